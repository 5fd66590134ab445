"""Key echo: every line's key again after its value, as an answer."""

from __future__ import annotations

import re

import pytest

from surgery.data.encoding import encode
from surgery.errors import ProbeError
from surgery.evaluate.prompts import make_prompts
from surgery.probes.documents import expected_answers, rng_of
from surgery.probes.echo import echo_document
from surgery.probes.kv_retrieval import HEADER, kv_document
from surgery.probes.words import FILLER, key_words
from surgery.recipe import Evaluate
from tests.support.pico import pico_tokenizer
from tests.support.samples import cut

LINE = re.compile(r"([a-z]+)((?: [a-z]+)*):(\d+) ([a-z]+)\n")


@pytest.mark.parametrize("filler", [None, (0, 0), (1, 6)])
@pytest.mark.parametrize("pairs", [2, 7, 100])
def test_exact_text(pairs: int, filler: tuple[int, int] | None) -> None:
    document = echo_document(rng_of("text", pairs), pairs, filler=filler)
    lines = LINE.findall(document.text.removeprefix(HEADER))
    assert document.text == HEADER + "".join(f"{key}{words}:{value} {again}\n" for key, words, value, again in lines)
    assert len(lines) == len({key for key, *_ in lines}) == len({value for *_, value, _ in lines}) == pairs
    assert [cut(document, q.answer) for q in document.questions] == [f" {key}" for key, *_ in lines]
    assert all(key == again for key, _, _, again in lines)
    low, high = filler or (0, 0)
    assert all(low <= len(words.split()) <= high and set(words.split()) <= set(FILLER) for _, words, *_ in lines)
    assert all(not q.choices and q.segment is None for q in document.questions)


def test_its_lines_are_those_of_kv_retrieval_with_the_key_again() -> None:
    echo, plain = echo_document(rng_of("same"), 5), kv_document(rng_of("same"), 5)
    assert re.sub(r" [a-z]+\n", "\n", echo.text.removeprefix(HEADER)) in plain.text


def test_keys_of_the_splits_are_disjoint() -> None:
    for split in ("train", "eval"):
        lines = LINE.findall(echo_document(rng_of("split"), 50, split).text)
        assert {key for key, *_ in lines} <= set(key_words(split))


@pytest.mark.parametrize("pairs", [1, 101])
def test_impossible_counts_are_refused(pairs: int) -> None:
    with pytest.raises(ProbeError) as caught:
        echo_document(rng_of(0), pairs)
    assert caught.value.field == "pairs"


def test_answers_are_the_tokens_of_the_second_keys() -> None:
    tokenizer = pico_tokenizer()
    document = echo_document(rng_of("encode"), 6, filler=(2, 4))
    batch = encode([document], tokenizer)
    marked = tokenizer.decode(batch.input_ids[0][batch.answers[0]])
    assert marked == "".join(cut(document, q.answer) for q in document.questions)
    assert (batch.query[0] >= 0).sum() == 6


def test_an_evaluation_scores_the_key_of_the_last_line() -> None:
    section = Evaluate.model_validate({"tasks": [{"task": "key_echo", "pairs": [3], "filler": [2, 2]}], "examples": 2})
    for document in make_prompts(section, 0).generation["key_echo/3"]:
        (key, *_), *_ = reversed(LINE.findall(document.text))
        assert expected_answers(document) == ([key], True)
