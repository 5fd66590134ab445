"""Offsets of tokenizers that trim spaces."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from surgery.data.encoding import encode
from surgery.data.offsets import Tokens, tokenized
from surgery.testing.pico import pico_tokenizer
from tests.support.samples import sample

TEXTS = ["a  b", " a b ", "a\n\nb: 42", "x  ", "   ", "\u5317\u4eac 42", ""]


def trimming() -> PreTrainedTokenizerFast:
    """The tokenizer of the tests, with the post-processor of GPT-NeoX-20B's tokenizer.json."""
    state = json.loads(pico_tokenizer().backend_tokenizer.to_str())
    state["post_processor"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    plain = pico_tokenizer()
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token=plain.eos_token, pad_token=plain.pad_token
    )


def test_trimmed_spaces_are_given_back() -> None:
    raw = trimming()("a b", return_offsets_mapping=True)["offset_mapping"]
    assert not any(start <= 1 < end for start, end in raw), "no token has the space"
    assert tokenized(trimming(), TEXTS) == tokenized(pico_tokenizer(), TEXTS)


@pytest.mark.parametrize("task", ["kv_retrieval", "letter_choice", "option_text", "closed_book"])
def test_every_position_is_that_of_the_tokenizer_without_trimming(task: str) -> None:
    documents = sample(task, 3)
    one, other = (encode(documents, tokenizer) for tokenizer in (trimming(), pico_tokenizer()))
    for name in ("input_ids", "query", "target", "answer_token", "segment_start", "segment_end", "read_answer_token"):
        assert getattr(one, name).equal(getattr(other, name)), name


def test_a_tokenizer_that_drops_spaces_has_no_token_for_them() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    assert tokenized(PreTrainedTokenizerFast(tokenizer_object=backend), ["a  b"]) == [Tokens([0, 1], (0, 3), (1, 4))]


@pytest.mark.parametrize("make", [trimming, pico_tokenizer])
def test_the_tokens_that_cover_a_character_are_those_of_a_search_of_all(
    make: Callable[[], PreTrainedTokenizerFast],
) -> None:
    for tokens, text in zip(tokenized(make(), TEXTS), TEXTS, strict=True):
        for char in range(len(text)):
            expected = [i for i, (start, end) in enumerate(tokens.offsets) if start <= char < end]
            assert list(tokens.covering(char)) == expected != []


def test_a_character_without_a_token_is_covered_by_none() -> None:
    assert list(Tokens([1, 2], (0, 3), (1, 4)).covering(2)) == []
    assert list(Tokens([1, 2, 3], (0, 1, 1), (1, 2, 2)).covering(1)) == [1, 2]
