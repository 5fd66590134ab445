"""Tokenize texts, with the characters that each token covers.

`tokenized` is the one place that decides how a text becomes ids. Every prompt, document and length goes through it.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Sequence
from operator import gt
from typing import NamedTuple

from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from surgery.probes.documents import Span


class Tokens(NamedTuple):
    """Tokens of a text. Token i covers the characters [starts[i], ends[i]). Both are sorted.

    Tokens that the tokenizer puts before the text cover none: [0, 0).

    Attributes:
        ids: token ids.
        starts, ends: equal or overlapping if a character's bytes are split into several tokens.
    """

    ids: list[int]
    starts: Sequence[int]
    ends: Sequence[int]

    def covering(self, char: int) -> range:
        """Find the tokens that cover a character: several if its bytes are split, none if the tokenizer drops it."""
        return range(bisect_right(self.ends, char), bisect_right(self.starts, char))

    @property
    def offsets(self) -> list[Span]:
        """Characters [start, end) of every token."""
        return list(zip(self.starts, self.ends, strict=True))


def tokenized(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], whole: bool = True) -> list[Tokens]:
    """Tokenize texts as `tokenizer(text)` does, up to the last token of each text.

    So a text gets the tokens that the tokenizer puts before one, such as BOS; only one, if it begins with it already,
    as a rendered chat template may. lm-eval does the same. Tokens that the tokenizer puts after a text, such as EOS,
    are left out: an answer may follow.

    A tokenizer whose post-processor trims offsets (`trim_offsets` of byte-level BPE) leaves the space before a word out
    of its token. Such spaces are given back to the token. A tokenizer that drops spaces has no token for them.

    Args:
        whole: the texts begin a sequence. False for those that continue one, which get no token before them.
    """
    encoded = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True)
    starts_ends = [tuple(zip(*offsets, strict=True)) or ((), ()) for offsets in encoded["offset_mapping"]]
    trimmed, ends = [first for first, _ in starts_ends], [last for _, last in starts_ends]
    starts = [_with_spaces(*of_text) for of_text in zip(texts, trimmed, ends, strict=True)]
    if starts != trimmed:
        alone, after_space = tokenizer(["b", " b"], add_special_tokens=False)["input_ids"]
        if alone == after_space:
            starts = trimmed
    before = before_text(tokenizer) if whole else []
    none = (0,) * len(before)
    return [
        Tokens(before + ids, none + first, none + last) if ids[:1] != before[:1] else Tokens(ids, first, last)
        for ids, first, last in zip(encoded["input_ids"], starts, ends, strict=True)
    ]


def before_text(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of the tokens that the tokenizer puts before a text, such as BOS. Most put none."""
    encoded = tokenizer("a 7", return_special_tokens_mask=True)
    return list(encoded["input_ids"][: [*encoded["special_tokens_mask"], 0].index(0)])


def for_prompts(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer whose `tokenizer(text)` has the ids of `tokenized`: a copy, if it puts tokens after a text."""
    before, (plain,) = before_text(tokenizer), tokenized(tokenizer, ["a 7"])
    if tokenizer("a 7")["input_ids"] == plain.ids:
        return tokenizer
    tokenizer = copy.deepcopy(tokenizer)
    names = tokenizer.convert_ids_to_tokens(before)
    special = list(zip(names, before, strict=True))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=[*names, "$A"], special_tokens=special)
    return tokenizer


SAMPLE_TEXT = "The value of 'key12' is 3.5%.\n\n\tNaïve: {'a': [1, 20, 300]}"


def encode_alike(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers have the same tokens and turn `SAMPLE_TEXT` into the same ids."""
    ids = [tokenized(tokenizer, [SAMPLE_TEXT])[0].ids for tokenizer in (one, other)]
    return one.get_vocab() == other.get_vocab() and ids[0] == ids[1]


def _with_spaces(text: str, starts: tuple[int, ...], ends: tuple[int, ...]) -> tuple[int, ...]:
    """Begin a token where the one before ends, if only spaces lie between."""
    before = (0, *ends[:-1])
    if not any(map(gt, starts, before)):  # the usual case: no gap
        return starts
    return tuple(e if s > e and text[e:s].isspace() else s for s, e in zip(starts, before, strict=True))
