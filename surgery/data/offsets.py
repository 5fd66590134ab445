"""Tokenize texts, with the characters that each token covers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import gt
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from surgery.probes.documents import Span


class Tokens(NamedTuple):
    """Tokens of a text. Token i covers the characters [starts[i], ends[i]). Both are sorted.

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

    def span(self, token: int) -> Span:
        """Return the characters [start, end) of a token."""
        return self.starts[token], self.ends[token]


def tokenized(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Tokens]:
    """Tokenize texts without special tokens.

    A tokenizer whose post-processor trims offsets (`trim_offsets` of byte-level BPE) leaves the space before a word out
    of its token. Such spaces are given back to the token. A tokenizer that drops spaces has no token for them.
    """
    encoded = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True)
    starts_ends = [tuple(zip(*offsets, strict=True)) or ((), ()) for offsets in encoded["offset_mapping"]]
    whole = [_with_spaces(text, *offsets) for text, offsets in zip(texts, starts_ends, strict=True)]
    if any(starts is not trimmed for starts, (trimmed, _) in zip(whole, starts_ends, strict=True)):
        alone, spaced = tokenizer(["b", " b"], add_special_tokens=False)["input_ids"]
        if alone == spaced:
            whole = [starts for starts, _ in starts_ends]
    ends = (ends for _, ends in starts_ends)
    return [Tokens(*tokens) for tokens in zip(encoded["input_ids"], whole, ends, strict=True)]


def _with_spaces(text: str, starts: Sequence[int], ends: Sequence[int]) -> Sequence[int]:
    """Begin a token where the one before ends, if only spaces lie between. Returns `starts` itself without a gap."""
    before = (0, *ends[:-1])
    if not any(map(gt, starts, before)):
        return starts
    return tuple(e if s > e and text[e:s].isspace() else s for s, e in zip(starts, before, strict=True))
