"""A step's documents depend on (seed, source, step) alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from surgery.data import generated as data
from surgery.data.encoding import encode
from surgery.data.generated import GeneratedStream
from surgery.errors import ProbeError
from surgery.probes.documents import Document, split_of
from surgery.probes.knowledge import fact_half, fact_question, fact_statement, facts
from surgery.probes.mqar import mqar_words
from surgery.probes.registry import PROBES
from surgery.probes.words import key_words
from surgery.recipe import Source
from tests.support.pico import pico_tokenizer

TASKS = (
    "kv_retrieval", "phonebook", "json_kv", "mqar", "multi_hop", "needle_single", "needle_multi_key",
    "needle_multi_value", "needle_multi_query", "letter_choice", "copying", "option_text", "closed_book", "statement",
    "sentence", "records", "key_echo", "kv_repeated",
)  # fmt: skip
NEEDLES = tuple(task for task in TASKS if task.startswith("needle_"))
OF_LINES = tuple(task for task in TASKS if "questions" in PROBES[task].options)
READING = tuple(task for task in TASKS if PROBES[task].gold_position)
ENDING = tuple(task for task in TASKS if PROBES[task].newline_ends_answer)
HALVED = ("closed_book", "statement", "letter_choice", "option_text", "sentence")
SIZES: dict[str, dict[str, Any]] = {
    "json_kv": {"groups": [4]},
    "multi_hop": {"pairs": [4, 16]},
    **{task: {"max_tokens": 320, "pairs": [2, 3]} for task in NEEDLES},
}


def source(task: str, rows: int | None = 3, **more: Any) -> Source:
    return Source.model_validate({"task": task, "rows": rows, "weights": {"lm": 1.0}, **SIZES.get(task, {}), **more})


def step_documents(source: Source, seed: int, index: int, step: int) -> list[Document]:
    return data.step_documents(source, seed, index, step, pico_tokenizer())


def texts(source: Source, seed: int = 0, index: int = 0, step: int = 0) -> list[str]:
    return [d.text for d in step_documents(source, seed, index, step)]


@pytest.mark.parametrize("task", TASKS)
def test_seed_index_and_step_each_matter(task: str) -> None:
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 1, 0), (0, 0, 11), (0, 11, 0)]
    assert len({tuple(texts(source(task, rows=8), *key)) for key in keys}) == len(keys)


@pytest.mark.parametrize("task", HALVED)
def test_halves_are_disjoint(task: str) -> None:
    seen = [{t for step in range(20) for t in texts(source(task, 10, split=half), step=step)} for half in (0, 1)]
    assert not seen[0] & seen[1]
    assert min(map(len, seen)) > 50


@pytest.mark.parametrize(("task", "tell"), [("closed_book", fact_question), ("statement", fact_statement)])
def test_facts_come_from_the_half_that_was_asked_for(task: str, tell: Any) -> None:
    for half in (0, 1, None):
        allowed = {tell(f).text for f in facts() if half in (None, f.half)}
        seen = {t for step in range(20) for t in texts(source(task, 10, split=half), step=step)}
        assert seen <= allowed
    assert {f.half for f in facts() if tell(f).text in seen} == {0, 1}


def test_fact_halves_make_up_the_whole() -> None:
    assert set(fact_half(0)) | set(fact_half(1)) == set(fact_half(None)) == set(facts())
    assert {f.half for f in fact_half(0)} == {0}
    assert {f.half for f in fact_half(1)} == {1}


@pytest.mark.parametrize("task", [t for t in TASKS if t not in HALVED])
@pytest.mark.parametrize("half", [0, 1])
def test_a_half_of_what_has_none_is_refused(task: str, half: int) -> None:
    with pytest.raises(ValueError, match=f"{task} has no halves"):
        step_documents(source(task, split=half), 0, 0, 0)


def test_pairs_stay_in_their_range_and_reach_its_ends() -> None:
    steps = [step_documents(source("kv_retrieval", pairs=(3, 6)), 0, 0, step) for step in range(60)]
    counts = [{len(d.questions[0].choices) for d in documents} for documents in steps]
    assert all(len(c) == 1 for c in counts), "documents of one step have one length"
    assert set.union(*counts) == {3, 4, 5, 6}


@pytest.mark.parametrize("task", OF_LINES)
def test_questions_are_as_many_as_asked_for_or_as_pairs_allow(task: str) -> None:
    """Two of a phonebook's lines are examples; of two lines one."""
    for step in range(30):
        for document in step_documents(source(task, pairs=(2, 8), questions=4), 0, 0, step):
            pairs = len(document.questions[0].choices)
            assert len(document.questions) == min(4, pairs - min(2, pairs - 1) if task == "phonebook" else pairs)


@pytest.mark.parametrize("task", READING)
def test_what_attention_is_pulled_to_is_the_answer_in_its_segment(task: str) -> None:
    more = {"questions": 3} if task in OF_LINES else {}
    trained = source(task, 6, weights={"answer": 1.0, "attention": 1.0}, **more)
    documents = step_documents(trained, 0, 0, 0)
    batch = encode(documents, pico_tokenizer())
    asked = batch.target >= 0
    assert int(asked.sum()) == sum(len(d.questions) for d in documents)
    assert bool(((batch.segment_start <= batch.answer_token) & (batch.answer_token <= batch.segment_end))[asked].all())
    assert bool((batch.segment_end < batch.query)[asked].all())
    if task != "letter_choice":  # there `A` stands at the option, and ` A` is the answer
        assert torch.equal(batch.input_ids.gather(1, batch.answer_token.clamp(min=0))[asked], batch.target[asked])


@pytest.mark.parametrize("task", ["mqar", "phonebook", "needle_single"])
def test_a_text_that_depends_on_a_tokenizer_is_not_made_without_one(task: str) -> None:
    with pytest.raises(ProbeError, match=f"The text of {task} depends on the tokenizer"):
        data.step_documents(source(task), 0, 0, 0)


@pytest.mark.parametrize("task", NEEDLES)
def test_needles_fit_into_the_tokens_given_and_stand_anywhere(task: str) -> None:
    documents = [d for step in range(6) for d in step_documents(source(task, 5), 0, 0, step)]
    batch = encode(documents, pico_tokenizer(), padding_side="left", until_answer=True)
    assert 290 < batch.input_ids.shape[1] <= 320
    places = [d.questions[0].segment[0] / len(d.text) for d in documents if d.questions[0].segment]
    assert len(places) == 30 and max(places) - min(places) > 0.1


@pytest.mark.parametrize("task", ENDING)
def test_an_answers_end_is_the_newline_behind_it(task: str) -> None:
    """The same documents, with one more token to each answer; where the value stands does not change."""
    more = {"questions": 3, "pairs": [5, 8]} if task in OF_LINES else {}
    plain, ended = (step_documents(source(task, 4, train_eos=end, **more), 0, 0, 0) for end in (False, True))
    batches = [encode(documents, pico_tokenizer()) for documents in (plain, ended)]
    for one, other in zip(plain, ended, strict=True):
        assert other.text == one.text.removesuffix("\n") + "\n" and len(one.questions) == len(other.questions) > 0
        for q, r in zip(one.questions, other.questions, strict=True):
            assert other.text[slice(*r.answer)] == one.text[slice(*q.answer)] + "\n"
            assert (r.value, r.segment) == (q.value, q.segment)
    asked = int((batches[0].query >= 0).sum())
    assert int(batches[1].answers.sum()) == int(batches[0].answers.sum()) + asked
    assert all(torch.equal(getattr(batches[0], n), getattr(batches[1], n)) for n in ("query", "target", "answer_token"))


@pytest.mark.parametrize(
    "given", [{"task": "copying"}, {"task": "json_kv"}, {"task": "sentence"}, {"data": {"path": "own.jsonl"}}]
)
def test_an_end_of_what_has_none_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="`train_eos` needs a newline after each answer"):
        Source.model_validate({**given, "rows": 1, "weights": {"lm": 1.0}, "train_eos": True})


def test_training_never_sees_evaluation_texts() -> None:
    keys = {
        k for step in range(20) for t in texts(source("kv_retrieval"), step=step) for k in re.findall(r"([a-z]+):\d", t)
    }
    assert keys
    assert not keys & set(key_words("eval"))
    for task in ("multi_hop", "needle_multi_query", "key_echo", "kv_repeated"):
        found = {w for step in range(20) for t in texts(source(task), step=step) for w in re.findall(r"[a-z]+", t)}
        assert found & set(key_words("train")) and not found & set(key_words("eval")), task
    records = " ".join(t for step in range(20) for t in texts(source("records"), step=step))
    names = set(re.findall(r"\w+", records.lower()))
    assert names & set(key_words("train")) and not names & set(key_words("eval"))
    words = {w for step in range(20) for t in texts(source("mqar"), step=step) for w in t.split()}
    assert words & set(mqar_words(pico_tokenizer(), "train").keys)
    assert not words & set(mqar_words(pico_tokenizer(), "eval").keys)
    for task, key in (("phonebook", r"([A-Za-z ]+):"), ("json_kv", r'"([0-9a-f]+)":')):
        found = {k for step in range(20) for t in texts(source(task), step=step) for k in re.findall(key, t)}
        assert found and {split_of(k) for k in found} == {"train"}
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
