"""Train the small tokenizer of the shipped checkpoints: byte-level BPE, lossless for any UTF-8 text.

The syllables of invented words are merged first and the corpus has no invented words, so the key of a probe is two or
more tokens. Integers from 0 to 99 are one token.
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from surgery.probes.documents import Document, rng_of
from surgery.probes.knowledge import fact_question, fact_statement, facts, letter_choice
from surgery.probes.kv_retrieval import HEADER
from surgery.probes.sentences import sentence
from surgery.probes.words import SYLLABLES

PAD, END = "<|pad|>", "<|endoftext|>"
# Letters with one leading space, two digits, or one character of anything else.
PIECES = r" ?\p{L}+|\p{N}{1,2}|\s|[^\s\p{L}\p{N}]"
_REPEATS = 3000  # of each syllable. More than any pair in the corpus, so syllables are merged first


def build_tokenizer(vocab_size: int = 1024, text: str = "") -> PreTrainedTokenizerFast:
    """Train the tokenizer on generated text. The same arguments give the same tokenizer, byte for byte.

    Args:
        vocab_size: maximum number of tokens, including special tokens and the 256 bytes.
        text: further text to train it on.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    corpus = _corpus()
    if text:  # its words are more frequent than numbers, which must stay one token
        corpus += [str(n) for n in range(100)] * _REPEATS + text.splitlines()
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        bos_token=END,
        model_max_length=1_000_000,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def _corpus() -> list[str]:
    """Repeated syllables, numbers, and texts of every template. Invented names are removed, or they would be merged."""
    rng = rng_of("tokenizer")
    syllables = [form for s in SYLLABLES for form in (s, s.capitalize(), f" {s.capitalize()}")]
    documents: list[Document] = [sentence(rng) for _ in range(600)]
    documents += [make(fact) for fact in facts() for make in (fact_question, fact_statement)]
    documents += [letter_choice(rng) for _ in range(100)]
    names = {fact.name for fact in facts()}
    texts = [" ".join(w for w in d.text.split(" ") if w.split("?")[0] not in names) for d in documents]
    prompt = HEADER + "The value of the key '' is"
    return syllables * _REPEATS + [str(n) for n in range(100)] * 20 + texts + [prompt] * 50
