"""Offsets of tokenizers that trim spaces."""

from __future__ import annotations

import copy
import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from surgery.data.encoding import encode
from surgery.data.offsets import Tokens, for_prompts, tokenized
from tests.support.pico import pico_tokenizer
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


def test_a_tokenizer_that_drops_spaces_has_no_token_for_them() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    assert tokenized(PreTrainedTokenizerFast(tokenizer_object=backend), ["a  b"]) == [Tokens([0, 1], (0, 3), (1, 4))]


@pytest.mark.parametrize("like_sentencepiece", [False, True])
def test_a_text_has_the_tokens_of_the_tokenizer_up_to_its_last_one(like_sentencepiece: bool) -> None:
    """Whatever it puts before and after a text."""
    plain = encode(sample("kv_retrieval", 2), texts_begin_with(None, like_sentencepiece))
    for template in (None, "<|endoftext|> $A", "<|endoftext|> $A <|endoftext|>", "$A <|endoftext|>"):
        tokenizer = texts_begin_with(template, like_sentencepiece)
        puts, after = (template or "").startswith("<"), (template or "").endswith(">")
        for text, tokens in zip(TEXTS, tokenized(tokenizer, TEXTS), strict=True):
            assert tokens.ids == tokenizer(text)["input_ids"][: -1 if after else None], template
            assert tokens.ids == for_prompts(tokenizer)(text)["input_ids"], template
            inner = tokenized(tokenizer, [text], whole=False)[0]
            assert tokens.ids == [tokenizer.bos_token_id] * puts + inner.ids, template
            for char in range(len(text)):
                assert [i - puts for i in tokens.covering(char)] == list(inner.covering(char)), template
            (twice,) = tokenized(tokenizer, [tokenizer.bos_token + text])
            assert twice.ids[0] == tokenizer.bos_token_id not in twice.ids[1:], "one, also if the text has it"
        batch = encode(sample("kv_retrieval", 2), tokenizer)
        assert ((batch.input_ids == tokenizer.bos_token_id).sum(1) == puts).all(), template
        for name in ("query", "segment_start", "segment_end", "answer_token", "read_query", "read_answer_token"):
            places = getattr(plain, name)
            assert getattr(batch, name).equal(places + puts * (places >= 0)), (template, name)
        assert batch.target.equal(plain.target) and batch.choice_tokens.equal(plain.choice_tokens), template


def texts_begin_with(template: str | None, like_sentencepiece: bool) -> PreTrainedTokenizerFast:
    """A tokenizer with this template of special tokens; with Metaspace instead of bytes, as Llama's."""
    tokenizer = copy.deepcopy(pico_tokenizer())
    if like_sentencepiece:
        characters = [chr(i) for i in range(32, 127)] + list("\n\u2581\u5317\u4eac")
        vocabulary = {token: i for i, token in enumerate(["<|pad|>", "<|endoftext|>", "?", *characters])}
        backend = Tokenizer(models.BPE(vocabulary, [], unk_token="?"))
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        names = {"pad_token": "<|pad|>", "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    if template is not None:
        special = [("<|endoftext|>", 1)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    return tokenizer


def test_the_tokens_that_cover_a_character_are_those_of_a_search_of_all() -> None:
    for make in (trimming, pico_tokenizer):
        for tokens, text in zip(tokenized(make(), TEXTS), TEXTS, strict=True):
            for char in range(len(text)):
                expected = [i for i, (start, end) in enumerate(tokens.offsets) if start <= char < end]
                assert list(tokens.covering(char)) == expected != []
    assert list(Tokens([1, 2], (0, 3), (1, 4)).covering(2)) == [], "the tokenizer drops it"
    assert list(Tokens([1, 2, 3], (0, 1, 1), (1, 2, 2)).covering(1)) == [1, 2]
