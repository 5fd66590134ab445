"""Builds the small tokenizer of the shipped checkpoints. Owns: its vocabulary. Must never know: models.

Byte-level BPE: any UTF-8 text survives encode and decode exactly. The syllables of the invented words are merged
first, and the corpus holds no invented word, so that a key of a probe spans two tokens or more; integers 0-99 are one.
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
# Letters with one leading space, digits two at a time, everything else one character at a time.
PIECES = r" ?\p{L}+|\p{N}{1,2}|\s|[^\s\p{L}\p{N}]"
_REPEATS = 3000  # a syllable's count: above that of any pair of the corpus, so that syllables are merged first


def build_tokenizer(vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    """Trains the tokenizer on the generators' own text. The same size gives the same tokenizer, byte for byte.

    Args:
        vocab_size: number of entries, special tokens and the 256 bytes included; at most 2,000.
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
    tokenizer.train_from_iterator(_corpus(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        bos_token=END,
        model_max_length=1_000_000,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    return fast


def _corpus() -> list[str]:
    """Syllables many times, numbers, and every kind of template text; invented names stay out, or they would merge."""
    rng = rng_of("tokenizer")
    syllables = [form for s in SYLLABLES for form in (s, s.capitalize(), f" {s.capitalize()}")]
    documents: list[Document] = [sentence(rng) for _ in range(600)]
    documents += [make(fact) for fact in facts() for make in (fact_question, fact_statement)]
    documents += [letter_choice(rng) for _ in range(100)]
    names = {fact.name for fact in facts()}
    texts = [" ".join(w for w in d.text.split(" ") if w.split("?")[0] not in names) for d in documents]
    prompt = HEADER + "The value of the key '' is"
    return syllables * _REPEATS + [str(n) for n in range(100)] * 20 + texts + [prompt] * 50
