"""Tokenize texts, with the characters that each token covers."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from surgery.probes.documents import Span


def tokenized(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[tuple[list[int], list[Span]]]:
    """Tokenize texts without special tokens: ids and offsets of each text.

    A tokenizer whose post-processor trims offsets (`trim_offsets` of byte-level BPE) leaves the space before a word out
    of its token. Such spaces are given back to the token. A tokenizer that drops spaces has no token for them.
    """
    encoded = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True)
    whole = [_with_spaces(text, offsets) for text, offsets in zip(texts, encoded["offset_mapping"], strict=True)]
    if whole != encoded["offset_mapping"]:
        alone, spaced = tokenizer(["b", " b"], add_special_tokens=False)["input_ids"]
        if alone == spaced:
            whole = encoded["offset_mapping"]
    return list(zip(encoded["input_ids"], whole, strict=True))


def _with_spaces(text: str, offsets: Sequence[Span]) -> list[Span]:
    """Begin a token where the one before ends, if only spaces lie between."""
    whole, last = [], 0
    for start, end in offsets:
        if start > last and text[last:start].isspace():
            start = last
        whole.append((start, end))
        last = max(last, end)
    return whole
