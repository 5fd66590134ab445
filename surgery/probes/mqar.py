"""Multi-query associative recall, MQAR (Arora et al., zoology, arXiv 2312.04927).

     k1 v1 k2 v2 ... kn vn k3 v3 k1 v1 ...

Pairs, then each key once more with its value as the label. Zoology draws token ids, keys from the lower half of the
vocabulary and values from the upper; here words that are one token each, so that a document is text like every other.
Two more differences: the labels stand in the text behind their keys, where zoology has random tokens, and the keys
follow one another without gaps. Owns: that text, and the words. Must never know: models.

A value is the last token of its segment: the two columns of the sharpen test are the same token here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING

from surgery.errors import ProbeError
from surgery.probes.documents import Document, Question, Split, Writer, split_of
from surgery.probes.pairs import check_pairs, check_questions
from surgery.probes.registry import Options, Probe, register_probe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WORD = re.compile(r" ?([A-Za-z]{2,})")


@dataclass(frozen=True)
class MqarWords:
    """What a document's keys and values are drawn from; no word is both."""

    keys: tuple[str, ...]
    values: tuple[str, ...]


def mqar_document(
    rng: Random, pairs: int, keys: Sequence[str], values: Sequence[str], questions: int | None = None
) -> Document:
    """`pairs` keys with their values, then `questions` of the keys again, each with its value; all of them by default.

    Args:
        keys, values: different words, each one token of the tokenizer behind a space: `mqar_words`. Documents of two
            splits differ if their keys do.

    Raises:
        ProbeError: more pairs than keys or values; more questions than pairs; a key that is a value too.
    """
    if not set(keys).isdisjoint(values):
        raise ProbeError("keys", sorted(set(keys) & set(values))[:4], "A word is a key or a value, not both.")
    check_pairs(pairs, min(len(keys), len(values)), f"There are {len(keys)} keys and {len(values)} values")
    questions = pairs if questions is None else questions
    check_questions(questions, pairs)
    drawn = rng.sample(keys, pairs)
    choices = tuple(f" {value}" for value in rng.sample(values, pairs))
    writer = Writer()
    spans = []
    for key, choice in zip(drawn, choices, strict=True):
        start, _ = writer.add(f" {key}")
        value_span = writer.add(choice)
        spans.append(((start, value_span[1]), value_span))
    asked = []
    for index in rng.sample(range(pairs), questions):
        writer.add(f" {drawn[index]}")
        answer = writer.add(choices[index])
        segment, value_span = spans[index]
        asked.append(Question(answer, choices, index, segment=segment, value=value_span))
    return Document("mqar", writer.text, tuple(asked))


@lru_cache(maxsize=4)  # every token of the vocabulary is decoded
def mqar_words(tokenizer: PreTrainedTokenizerBase, split: Split = "train") -> MqarWords:
    """Words of a tokenizer: the lower half by id are keys, one in five kept for evaluation, the upper half values.

    Raises:
        ProbeError: it has fewer than 20 words that are one token behind a space.
    """
    words = single_token_words(tokenizer)
    if len(words) < 20:
        raise ProbeError("tokenizer", f"{len(words)} words of one token", "MQAR needs 20; use another probe.")
    half = len(words) // 2
    return MqarWords(tuple(w for w in words[:half] if split_of(w, 5) == split), words[half:])


def single_token_words(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Words of two Latin letters or more that are one token behind a space and stay so in a row, by token id."""
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    words = list({match[1]: None for text in texts if (match := _WORD.fullmatch(text))})
    if not words:
        return ()
    once, twice = (
        tokenizer([f" {word}" * times for word in words], add_special_tokens=False)["input_ids"] for times in (1, 2)
    )
    found = {w: one[0] for w, one, two in zip(words, once, twice, strict=True) if len(one) == 1 and two == one * 2}
    return tuple(sorted(found, key=lambda word: found[word]))


@register_probe("mqar")
class Mqar(Probe):
    """MQAR: `mqar_document`, with words of the base's tokenizer."""

    pairs = (2, 100)
    options = ("questions",)
    gold_position = needs_tokenizer = True
    lm_eval_group = None

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        """Keys with values, then some of the keys again."""
        self.check_tokenizer(options.tokenizer)
        words = mqar_words(options.tokenizer, split)
        return mqar_document(rng, options.pairs, words.keys, words.values, options.questions)
