"""A step's documents depend on (seed, source, step) alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from surgery.data.encoding import encode
from surgery.data.generated import GeneratedStream
from surgery.errors import ProbeError
from surgery.probes.documents import Document, split_of
from surgery.probes.knowledge import fact_question, fact_statement, facts
from surgery.probes.registry import PROBES
from surgery.probes.words import key_words
from surgery.recipe import Source
from tests.support.pico import pico_tokenizer
from tests.unit.probes.test_unchanged import DIGESTS

TASKS = tuple(task for task in DIGESTS if PROBES[task].trains)
OF_LINES = tuple(task for task in TASKS if "questions" in PROBES[task].options)
HALVED = ("closed_book", "statement", "letter_choice", "option_text", "sentence")
SIZES: dict[str, dict[str, Any]] = {
    "json_kv": {"groups": [4]},
    "multi_hop": {"pairs": [4, 16]},
    **{task: {"max_tokens": 320, "pairs": [2, 3]} for task in TASKS if task.startswith("needle_multi")},
    "needle_single": {"max_tokens": 320},
}


def source(task: str, rows: int | None = 3, **more: Any) -> Source:
    return Source.model_validate({"task": task, "rows": rows, "weights": {"lm": 1.0}, **SIZES.get(task, {}), **more})


def documents(source: Source, seed: int = 0, index: int = 0, step: int = 0) -> list[Document]:
    return GeneratedStream(source, pico_tokenizer(), seed, index).step(step)


def texts(source: Source, steps: int = 20) -> list[str]:
    stream = GeneratedStream(source, pico_tokenizer(), 0, 0)
    return [document.text for step in range(steps) for document in stream.step(step)]


def sizes(found: list[Document]) -> list[int]:
    return [len(pico_tokenizer()(d.text, add_special_tokens=False)["input_ids"]) for d in found]


def test_a_step_depends_on_its_key_alone() -> None:
    for task in TASKS:
        stream = GeneratedStream(source(task), pico_tokenizer(), 3, 1)
        assert [stream.step(s) for s in (4, 0)] == [documents(source(task), 3, 1, s) for s in (4, 0)], task
        keys = ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))
        found = {tuple(d.text for d in documents(source(task), *key)) for key in keys}
        assert len(found) == len(keys), task


def test_facts_come_from_the_half_that_was_asked_for() -> None:
    told = {f: (f"Question: What is the {f.relation} of {f.name}?", fact_statement(f).text) for f in facts()}
    for task in PROBES["closed_book"].held_out_from:
        for half, expected in ((0, {0}), (1, {1}), (None, {0, 1})):
            made = texts(source(task, 10, split=half), 4)
            assert {f.half for f, starts in told.items() if any(t.startswith(starts) for t in made)} == expected, task
    held_out = {document.text for document in PROBES["closed_book"].evaluation_set()}
    assert held_out == {fact_question(fact).text for fact in facts() if fact.half == 1}
    for task in set(TASKS) - set(HALVED):
        with pytest.raises(ValueError, match=f"{task} does not use `split`"):
            documents(source(task, split=0))


def test_pairs_stay_in_their_range_and_reach_its_ends() -> None:
    steps = [documents(source("kv_retrieval", pairs=(3, 6)), step=step) for step in range(60)]
    counts = [{len(d.questions[0].choices) for d in found} for found in steps]
    assert all(len(c) == 1 for c in counts), "documents of one step have one length"
    assert set.union(*counts) == {3, 4, 5, 6}


def test_a_text_that_depends_on_a_tokenizer_is_not_made_without_one() -> None:
    for task in ("mqar", "phonebook", "needle_single"):
        with pytest.raises(ProbeError, match=f"The text of {task} depends on the tokenizer"):
            GeneratedStream(source(task), None, 0, 0).step(0)


def test_an_answers_end_is_the_newline_behind_it() -> None:
    """The same documents, with one more token to each answer; where the value stands does not change."""
    for task in (task for task in TASKS if PROBES[task].newline_ends_answer):
        more = {"questions": 3, "pairs": [5, 8]} if task in OF_LINES else {}
        plain, ended = (documents(source(task, 4, train_eos=end, **more)) for end in (False, True))
        batches = [encode(found, pico_tokenizer()) for found in (plain, ended)]
        for one, other in zip(plain, ended, strict=True):
            assert other.text == one.text.removesuffix("\n") + "\n" and len(one.questions) > 0, task
            for q, r in zip(one.questions, other.questions, strict=True):
                assert other.text[slice(*r.answer)] == one.text[slice(*q.answer)] + "\n", task
                assert (r.value, r.segment) == (q.value, q.segment), task
        asked = int((batches[0].query >= 0).sum())
        assert int(batches[1].answers.sum()) == int(batches[0].answers.sum()) + asked, task
        for name in ("query", "target", "answer_token"):
            assert torch.equal(getattr(batches[0], name), getattr(batches[1], name)), task
    for given in ({"task": "copying"}, {"task": "json_kv"}, {"task": "sentence"}, {"data": {"path": "own.jsonl"}}):
        with pytest.raises(ValueError, match="does not use `train_eos`"):
            Source.model_validate({**given, "rows": 1, "weights": {"lm": 1.0}, "train_eos": True})


def test_training_never_sees_evaluation_texts() -> None:
    of_key_words = {"kv_retrieval", "multi_hop", "key_echo", "kv_repeated", "records"}
    for task in of_key_words | {task for task in TASKS if task.startswith("needle")}:
        found = set(re.findall(r"[a-z]+", " ".join(texts(source(task))).lower()))
        assert found & set(key_words("train")) and not found & set(key_words("eval")), task
    patterns = {"phonebook": r"([A-Za-z ]+):", "json_kv": r'"([0-9a-f]+)":', "copying": r"text:\n(.*)\n"}
    for task, key in patterns.items():
        keys = {k for t in texts(source(task)) for k in re.findall(key, t)}
        assert keys and {split_of(k) for k in keys} == {"train"}, task
    for task in ("letter_choice", "sentence"):
        assert {split_of(text.split("Answer:")[0]) for text in texts(source(task))} == {"train"}, task


def test_a_budget_holds_the_documents_that_rows_would_give_as_far_as_it_goes() -> None:
    for task in TASKS:
        for step, tokens in enumerate((1, 400)):
            found = documents(source(task, rows=None, tokens=tokens), step=step)
            more = documents(source(task, rows=len(found) + 1), step=step)
            assert found == more[:-1], task
            assert len(found) == 1 or 0 < sum(sizes(found)) <= tokens, task
            assert sum(sizes(more)) > tokens, task
    first = documents(source("letter_choice", rows=3))
    for tokens, kept in ((sum(sizes(first)), 3), (sum(sizes(first)) - 1, 2)):
        assert documents(source("letter_choice", rows=None, tokens=tokens)) == first[:kept]
