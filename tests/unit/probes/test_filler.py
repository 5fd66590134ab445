"""`filler` and `value_digits`: what they change, that they change nothing else, and where recipes accept them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from surgery.data.generated import maker
from surgery.errors import ProbeError
from surgery.evaluate.evaluation import evaluate_model
from surgery.evaluate.prompts import make_prompts
from surgery.probes.documents import rng_of
from surgery.probes.pairs import fillers, num_values, numbers
from surgery.probes.registry import PROBES
from surgery.probes.words import FILLER
from surgery.recipe import Evaluate, EvaluationTask, Source
from tests.support.pico import pico_base, pico_tokenizer

WORDS = re.compile(rf"(?: (?:{'|'.join(FILLER)}))+")


def test_the_schema_lists_the_tasks_that_take_them() -> None:
    for option in ("filler", "value_digits"):
        tasks = {name for name, probe in PROBES.items() if option in probe.options}
        for section in (Source, EvaluationTask):
            listed, _ = str(section.model_fields[option].description).split(": ", 1)
            assert set(listed.split(", ")) == tasks


def test_fillers_cover_their_range() -> None:
    drawn = fillers(rng_of("range"), 500, (0, 20))
    assert {len(words.split()) for words in drawn} == set(range(21))
    assert {word for words in drawn for word in words.split()} == set(FILLER)
    assert all(words == "" or words[0] == " " for words in drawn)
    ids = pico_tokenizer()([f" {word}" for word in FILLER], add_special_tokens=False)["input_ids"]
    assert {len(word) for word in ids} == {1}, "one token of the shipped models"
    for words in ((2, 1), (-1, 3)):
        with pytest.raises(ProbeError, match=r"filler: .*0 <= low <= high"):
            fillers(rng_of(0), 3, words)


def test_numbers_are_different_and_their_lengths_are_those_with_enough_of_them() -> None:
    lengths = set()
    for seed in range(60):
        drawn = numbers(rng_of("numbers", seed), 11, (1, 3))
        assert len(set(drawn)) == 11 and all(str(int(number)) == number for number in drawn)
        lengths |= set(map(len, drawn))
    assert lengths == {2, 3}, "there are ten numbers of one digit"
    assert set(numbers(rng_of(0), 10, (1, 1))) == set("0123456789")
    assert [num_values(digits) for digits in (1, 2, 3)] == [10, 90, 900]
    with pytest.raises(ProbeError, match=r"pairs: 91.*Only 90 numbers have 2 digits"):
        numbers(rng_of(0), 91, (1, 2))
    for digits in ((0, 2), (3, 2)):
        with pytest.raises(ProbeError, match="value_digits"):
            numbers(rng_of(0), 4, digits)


def source(**given: Any) -> Source:
    return Source.model_validate({"task": "kv_retrieval", "rows": 1, "weights": {"answer": 1.0}, **given})


def test_a_source_passes_both_on() -> None:
    made = maker(source(pairs=[5, 5], filler=[2, 4], value_digits=[6, 6]), rng_of(3))()
    lines = re.findall(r"^[a-z]+((?: [a-z]+)*):(\d+)$", made.text, re.M)
    assert len(lines) == 5
    assert all(2 <= len(words.split()) <= 4 and len(value) == 6 for words, value in lines)


def evaluation(**given: Any) -> Evaluate:
    return Evaluate.model_validate({"pairs": [8], **given})


def test_what_does_not_fit_is_refused() -> None:
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (source, {"filler": [4, 2]}, "low <= high"),
        (source, {"task": "mqar", "filler": [0, 2]}, "mqar does not use `filler`"),
        (source, {"value_digits": [0, 2]}, "greater than or equal to 1"),
        (source, {"value_digits": [1, 1]}, "10 values of 1 digits, fewer than 16 `pairs`"),
        (source, {"value_digits": [1, 2], "pairs": [2, 91]}, "90 values of 2 digits, fewer than 91 `pairs`"),
        (evaluation, {"tasks": [{"task": "copying", "filler": [1, 2]}]}, "copying does not use `filler`"),
        (evaluation, {"tasks": [{"task": "records", "value_digits": [1, 1]}], "pairs": [16]}, "fewer than 16 `pairs`"),
        (evaluation, {"tasks": ["perplexity", {"task": "perplexity", "name": "x"}]}, "perplexity does not use `name`"),
        (evaluation, {"tasks": [{"task": "records", "name": "kv_retrieval"}]}, "another meaning in results"),
        (evaluation, {"tasks": [{"task": "records", "name": "a/b"}]}, "name"),
        (evaluation, {"tasks": ["records", {"task": "records", "filler": [1, 2]}]}, "lists records twice.*set `name`"),
        (evaluation, {"tasks": [{"task": "records", "name": "far"}], "generate": ["records"]}, "not among"),
    ]
    for make, given, why in cases:
        with pytest.raises(ValidationError, match=why):
            make(**given)


def test_a_task_is_evaluated_near_and_far_on_the_same_pairs() -> None:
    far = {"task": "kv_retrieval", "name": "kv_far", "filler": [4, 4]}
    section = Evaluate.model_validate({"tasks": ["kv_retrieval", far], "pairs": [3, 5], "examples": 4})
    assert Evaluate.model_validate(section.model_dump(mode="json")) == section
    prompts = make_prompts(section, 0)
    assert list(prompts.choices) == ["kv_retrieval/3", "kv_retrieval/5", "kv_far/3", "kv_far/5"]
    for near, far_document in zip(prompts.choices["kv_retrieval/5"], prompts.choices["kv_far/5"], strict=True):
        assert WORDS.sub("", far_document.text) == near.text != far_document.text
    model = pico_base(vocab_size=1024, layers=1)
    summary = evaluate_model(model, pico_tokenizer(), section, 0, prompts).summary
    assert set(summary) == {"kv_retrieval", "kv_far"} and set(summary["kv_far"]) == {"3", "5"}
