"""Multi-query associative recall, MQAR (Arora et al., zoology, arXiv 2312.04927).

     k1 v1 k2 v2 ... kn vn k3 v3 k1 v1 ...

Pairs, then each key again with its value as the label. Zoology draws token ids: keys from the lower half of the
vocabulary, values from the upper half. Here they are words of one token each, so a document is text like any other. Two
more differences: the labels are in the text after their keys, where zoology has random tokens, and there are no gaps
between keys.

A value is the last token of its segment, so the two columns of `sharpen` (the oracle read) are the same token.
"""

from __future__ import annotations

import re
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING

from surgery.errors import ProbeError
from surgery.probes.documents import Document, Split, Writer, split_of
from surgery.probes.pairs import ask, check_pairs
from surgery.probes.registry import Options, Probe, register_probe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WORD = re.compile(r" ?([A-Za-z]{2,})")


@lru_cache(maxsize=4)  # every token of the vocabulary is decoded
def mqar_words(tokenizer: PreTrainedTokenizerBase, split: Split = "train") -> tuple[tuple[str, ...], ...]:
    """Select the words to draw keys from, of the lower half of the ids, and values, of the upper half.

    One key in five belongs to the split `eval`.

    Raises:
        ProbeError: fewer than 20 words are one token after a space.
    """
    words = single_token_words(tokenizer)
    if len(words) < 20:
        raise ProbeError("tokenizer", f"{len(words)} words of one token", "MQAR needs 20. Use another probe.")
    half = len(words) // 2
    return tuple(w for w in words[:half] if split_of(w, 5) == split), words[half:]


def single_token_words(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """List the words of two or more Latin letters that are one token after a space, also when repeated, by token id."""
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    words = list({match[1]: None for text in texts if (match := _WORD.fullmatch(text))})
    if not words:
        return ()
    once, twice = (
        tokenizer([f" {word}" * times for word in words], add_special_tokens=False)["input_ids"] for times in (1, 2)
    )
    ids = {w: one[0] for w, one, two in zip(words, once, twice, strict=True) if len(one) == 1 and two == one * 2}
    return tuple(sorted(ids, key=lambda word: ids[word]))


@register_probe("mqar")
class Mqar(Probe):
    """MQAR, with words of the base's tokenizer."""

    pairs = (2, 100)
    options = ("questions",)
    gold_position = needs_tokenizer = True
    lm_eval_group = None

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        """Generate keys with their values, then some of the keys again with their values.

        Raises:
            ProbeError: more pairs than the tokenizer has words.
        """
        self.check_tokenizer(options.tokenizer)
        keys, values = mqar_words(options.tokenizer, split)
        check_pairs(options.pairs, min(len(keys), len(values)), f"There are {len(keys)} keys and {len(values)} values")
        drawn = rng.sample(keys, options.pairs)
        choices = tuple(f" {value}" for value in rng.sample(values, options.pairs))
        writer = Writer()
        spans = [writer.add_segment(f" {key}", choice, "") for key, choice in zip(drawn, choices, strict=True)]
        queried = rng.sample(range(options.pairs), options.questions)
        questions = [ask(writer, f" {drawn[index]}", choices, index, spans) for index in queried]
        return Document("mqar", writer.text, tuple(questions))
