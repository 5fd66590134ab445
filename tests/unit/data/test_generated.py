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
from surgery.probes.knowledge import fact_half, fact_question, fact_statement, facts
from surgery.probes.registry import PROBES
from surgery.probes.words import key_words
from surgery.recipe import Source
from tests.support.pico import pico_tokenizer

_SEVERAL = """kv_retrieval phonebook json_kv mqar multi_hop needle_single needle_multi_query letter_choice copying
option_text closed_book statement sentence records key_echo kv_repeated"""
TASKS = tuple(task for task in _SEVERAL.split() if task in PROBES)
OF_LINES = tuple(task for task in TASKS if "questions" in PROBES[task].options)
HALVED = ("closed_book", "statement", "letter_choice", "option_text", "sentence")
SIZES: dict[str, dict[str, Any]] = {
    "json_kv": {"groups": [4]},
    "multi_hop": {"pairs": [4, 16]},
    **{task: {"max_tokens": 320, "pairs": [2, 3]} for task in TASKS if task.startswith("needle_")},
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
        assert len(found) == len(keys) and stream.skipped == 0, task


def test_facts_come_from_the_half_that_was_asked_for() -> None:
    for task, tell in (("closed_book", fact_question), ("statement", fact_statement)):
        for half in (0, 1, None):
            allowed = {tell(f).text for f in fact_half(half)}
            assert set(texts(source(task, 10, split=half))) <= allowed, (task, half)
    assert set(fact_half(0)) | set(fact_half(1)) == set(facts()) and not set(fact_half(0)) & set(fact_half(1))
    for task in set(TASKS) - set(HALVED):
        with pytest.raises(ValueError, match=f"{task} does not use `split`"):
            documents(source(task, split=0))


def test_pairs_stay_in_their_range_and_reach_its_ends() -> None:
    steps = [documents(source("kv_retrieval", pairs=(3, 6)), step=step) for step in range(60)]
    counts = [{len(d.questions[0].choices) for d in found} for found in steps]
    assert all(len(c) == 1 for c in counts), "documents of one step have one length"
    assert set.union(*counts) == {3, 4, 5, 6}


def test_what_attention_is_pulled_to_is_the_answer_in_its_segment() -> None:
    for task in (task for task in TASKS if PROBES[task].gold_position):
        more = {"questions": 3} if task in OF_LINES else {}
        found = documents(source(task, 6, weights={"answer": 1.0, "attention": 1.0}, **more))
        batch = encode(found, pico_tokenizer())
        asked, (start, end) = batch.target >= 0, (batch.segment_start, batch.segment_end)
        assert int(asked.sum()) == sum(len(d.questions) for d in found), task
        assert bool(((start <= batch.answer_token) & (batch.answer_token <= end) & (end < batch.query))[asked].all())
        if task != "letter_choice":  # there `A` stands at the option, and ` A` is the answer
            read = batch.input_ids.gather(1, batch.answer_token.clamp(min=0))
            assert torch.equal(read[asked], batch.target[asked]), task


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
    of_key_words = {"kv_retrieval", "multi_hop", "needle_multi_query", "key_echo", "kv_repeated", "records"}
    for task in of_key_words & set(TASKS):
        found = set(re.findall(r"[a-z]+", " ".join(texts(source(task))).lower()))
        assert found & set(key_words("train")) and not found & set(key_words("eval")), task
    for task, key in (("phonebook", r"([A-Za-z ]+):"), ("json_kv", r'"([0-9a-f]+)":')):
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
