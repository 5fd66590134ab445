"""Repeated dictionary: every pair twice, the values of the second listing as answers."""

from __future__ import annotations

import re

import pytest

from surgery.data.encoding import encode
from surgery.errors import ProbeError
from surgery.evaluate.prompts import make_prompts
from surgery.probes.documents import rng_of
from surgery.probes.kv_retrieval import HEADER, kv_document
from surgery.probes.repeated import repeated_document
from surgery.probes.words import FILLER, key_words
from surgery.recipe import Evaluate
from tests.support.pico import pico_tokenizer
from tests.support.samples import cut

LINE = re.compile(r"([a-z]+)((?: [a-z]+)*):(\d+)\n")


@pytest.mark.parametrize("filler", [None, (0, 0), (1, 6)])
@pytest.mark.parametrize("pairs", [2, 7, 100])
def test_both_listings_hold_the_same_pairs(pairs: int, filler: tuple[int, int] | None) -> None:
    document = repeated_document(rng_of("text", pairs), pairs, filler=filler)
    lines = LINE.findall(document.text.removeprefix(HEADER))
    assert document.text == HEADER + "".join(f"{key}{words}:{value}\n" for key, words, value in lines)
    first, second = lines[:pairs], lines[pairs:]
    assert len({key for key, *_ in first}) == len({value for *_, value in first}) == pairs
    assert sorted((key, value) for key, _, value in first) == sorted((key, value) for key, _, value in second)
    assert [cut(document, q.answer) for q in document.questions] == [value for *_, value in second]
    low, high = filler or (0, 0)
    assert all(low <= len(words.split()) <= high and set(words.split()) <= set(FILLER) for _, words, _ in lines)


def test_a_question_points_to_its_pair_in_the_first_listing() -> None:
    document = repeated_document(rng_of("gold"), 6, filler=(0, 3))
    keys = [key for key, *_ in LINE.findall(document.text.removeprefix(HEADER))[6:]]
    for key, question in zip(keys, document.questions, strict=True):
        assert question.segment is not None and question.value is not None
        assert cut(document, question.segment).startswith(key)
        assert cut(document, question.value) == cut(document, question.answer) == question.choices[question.gold]
        assert question.segment[1] < question.answer[0]


def test_its_first_listing_is_that_of_kv_retrieval() -> None:
    repeated, plain = repeated_document(rng_of("same"), 5), kv_document(rng_of("same"), 5)
    first = LINE.findall(repeated.text.removeprefix(HEADER))[:5]
    assert plain.text.startswith(HEADER + "".join(f"{key}:{value}\n" for key, _, value in first))


def test_keys_of_the_splits_are_disjoint() -> None:
    for split in ("train", "eval"):
        lines = LINE.findall(repeated_document(rng_of("split"), 50, split).text)
        assert {key for key, *_ in lines} <= set(key_words(split))


@pytest.mark.parametrize("pairs", [1, 101])
def test_impossible_counts_are_refused(pairs: int) -> None:
    with pytest.raises(ProbeError) as caught:
        repeated_document(rng_of(0), pairs)
    assert caught.value.field == "pairs"


def test_answers_are_the_tokens_of_the_second_values() -> None:
    tokenizer = pico_tokenizer()
    document = repeated_document(rng_of("encode"), 6, filler=(2, 4))
    batch = encode([document], tokenizer)
    marked = tokenizer.decode(batch.input_ids[0][batch.answers[0]])
    assert marked == "".join(cut(document, q.answer) for q in document.questions)
    assert (batch.query[0] >= 0).sum() == (batch.answer_token[0] >= 0).sum() == 6


def test_an_evaluation_scores_the_last_line() -> None:
    tasks = [{"task": "kv_repeated", "pairs": [3], "filler": [2, 2]}]
    prompts = make_prompts(Evaluate.model_validate({"tasks": tasks, "examples": 2}), 0)
    for document in prompts.choices["kv_repeated/3"]:
        *_, (_, _, value) = LINE.findall(document.text)
        (question,) = document.questions[-1:]
        assert question.choices[question.gold] == value
