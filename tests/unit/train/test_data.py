"""A step's documents depend on (seed, source, step) alone."""

from __future__ import annotations

import re
from typing import Any

import pytest

from surgery.probes.documents import Document, rng_of, split_of
from surgery.probes.knowledge import fact_question, fact_statement, facts
from surgery.probes.words import key_words
from surgery.recipe import Source
from surgery.train.data import GeneratedStream, fact_half, sentence_half, step_documents
from tests.pico import pico_tokenizer

TASKS = ("kv_retrieval", "copying", "letter_choice", "option_text", "closed_book", "statement", "sentence")
HALVED = ("closed_book", "statement", "sentence")


def source(task: str, rows: int | None = 3, **more: Any) -> Source:
    return Source.model_validate({"task": task, "rows": rows, "weights": {"text": 1.0}, **more})


def texts(source: Source, seed: int = 0, index: int = 0, step: int = 0) -> list[str]:
    return [d.text for d in step_documents(source, seed, index, step)]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("rows", [1, 5])
def test_a_source_gives_its_rows_of_its_task(task: str, rows: int) -> None:
    documents = step_documents(source(task, rows), 0, 0, 0)
    assert [d.task for d in documents] == [task] * rows


@pytest.mark.parametrize("task", TASKS)
def test_the_order_of_asking_does_not_matter(task: str) -> None:
    forward = {step: step_documents(source(task), 7, 1, step) for step in range(4)}
    backward = {step: step_documents(source(task), 7, 1, step) for step in reversed(range(4))}
    assert forward == backward


@pytest.mark.parametrize("task", TASKS)
def test_seed_index_and_step_each_matter(task: str) -> None:
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 1, 0), (0, 0, 11), (0, 11, 0)]
    assert len({tuple(texts(source(task, rows=8), *key)) for key in keys}) == len(keys)


@pytest.mark.parametrize("task", HALVED)
def test_halves_are_disjoint(task: str) -> None:
    seen = [{t for step in range(20) for t in texts(source(task, 10, half=half), step=step)} for half in (0, 1)]
    assert not seen[0] & seen[1]
    assert min(map(len, seen)) > 50


@pytest.mark.parametrize(("task", "tell"), [("closed_book", fact_question), ("statement", fact_statement)])
def test_facts_come_from_the_half_that_was_asked_for(task: str, tell: Any) -> None:
    for half in (0, 1, None):
        allowed = {tell(f).text for f in facts() if half in (None, f.half)}
        seen = {t for step in range(20) for t in texts(source(task, 10, half=half), step=step)}
        assert seen <= allowed
    assert {f.half for f in facts() if tell(f).text in seen} == {0, 1}


def test_fact_halves_make_up_the_whole() -> None:
    assert set(fact_half(0)) | set(fact_half(1)) == set(fact_half(None)) == set(facts())
    assert {f.half for f in fact_half(0)} == {0}
    assert {f.half for f in fact_half(1)} == {1}


def test_sentence_halves_keep_their_split() -> None:
    for split in ("train", "eval"):
        rng = rng_of("halves", split)
        made = [{sentence_half(rng, half, split).text for _ in range(60)} for half in (0, 1)]
        assert not made[0] & made[1]
        assert {split_of(t) for half in made for t in half} == {split}


@pytest.mark.parametrize("task", [t for t in TASKS if t not in HALVED])
@pytest.mark.parametrize("half", [0, 1])
def test_a_half_of_what_has_none_is_refused(task: str, half: int) -> None:
    with pytest.raises(ValueError, match=f"{task} has no halves"):
        step_documents(source(task, half=half), 0, 0, 0)


def test_pairs_stay_in_their_range_and_reach_its_ends() -> None:
    steps = [step_documents(source("kv_retrieval", pairs=(3, 6)), 0, 0, step) for step in range(60)]
    counts = [{len(d.questions[0].choices) for d in documents} for documents in steps]
    assert all(len(c) == 1 for c in counts), "documents of one step have one length"
    assert set.union(*counts) == {3, 4, 5, 6}


def test_questions_are_as_many_as_asked_for_or_as_pairs_allow() -> None:
    for step in range(30):
        for document in step_documents(source("kv_retrieval", pairs=(2, 6), questions=4), 0, 0, step):
            assert len(document.questions) == min(4, len(document.questions[0].choices))


def test_training_never_sees_evaluation_texts() -> None:
    keys = {
        k for step in range(20) for t in texts(source("kv_retrieval"), step=step) for k in re.findall(r"([a-z]+):\d", t)
    }
    assert keys
    assert not keys & set(key_words("eval"))
    for task in ("letter_choice", "sentence"):
        for step in range(20):
            for text in texts(source(task), step=step):
                assert split_of(text.split("Answer:")[0]) == "train"


def budgeted(task: str, tokens: int | None, seed: int = 0, **more: Any) -> GeneratedStream:
    return GeneratedStream(source(task, rows=None, tokens=tokens, **more), pico_tokenizer(), seed, 0)


def sizes(documents: list[Document]) -> list[int]:
    return [len(pico_tokenizer()(d.text, add_special_tokens=False)["input_ids"]) for d in documents]


@pytest.mark.parametrize("task", TASKS)
def test_a_stream_of_rows_gives_the_step_documents(task: str) -> None:
    stream = GeneratedStream(source(task), pico_tokenizer(), 3, 1)
    assert [stream.step(s) for s in (4, 0)] == [step_documents(source(task), 3, 1, s) for s in (4, 0)]
    assert stream.skipped == 0


@pytest.mark.parametrize("task", TASKS)
def test_a_budget_holds_the_documents_that_rows_would_give_as_far_as_it_goes(task: str) -> None:
    for step, tokens in enumerate((1, 90, 250, 1000)):
        documents = budgeted(task, tokens).step(step)
        more = step_documents(source(task, rows=len(documents) + 1), 0, 0, step)
        assert documents == more[:-1]
        assert len(documents) == 1 or 0 < sum(sizes(documents)) <= tokens
        assert sum(sizes(more)) > tokens


def test_a_budget_that_is_met_exactly_is_used_up() -> None:
    first = step_documents(source("letter_choice", rows=3), 0, 0, 0)
    assert budgeted("letter_choice", sum(sizes(first))).step(0) == first
    assert budgeted("letter_choice", sum(sizes(first)) - 1).step(0) == first[:2]
