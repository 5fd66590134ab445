"""Prompts of an evaluation: which tasks and sizes, the same whatever stands beside them, and with their text twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from surgery.errors import ProbeError
from surgery.evaluate.evaluation import evaluate_model
from surgery.evaluate.prompts import make_prompts, prompts_twice, read_twice
from surgery.probes.documents import Document, rng_of
from surgery.probes.registry import PROBES, Options
from surgery.recipe import Evaluate
from surgery.recipe.evaluate import DEFAULT_TASKS
from tests.support.pico import pico_base, pico_tokenizer

EVERY = [
    {"task": "kv_retrieval", "pairs": [3]}, {"task": "mqar", "pairs": [4]}, {"task": "phonebook", "pairs": [4]},
    {"task": "json_kv", "pairs": [3]}, {"task": "multi_hop", "pairs": [9], "hops": 3},
    {"task": "copying", "pairs": [3, 4]}, {"task": "needle_single", "tokens": [320], "depths": [0, 0.5]},
    {"task": "needle_multi_key", "tokens": [320], "depths": [1]},
    {"task": "needle_multi_value", "tokens": [320], "depths": [0.25], "needles": 2},
    {"task": "needle_multi_query", "tokens": [350], "depths": [0.5], "needles": 3},
    "letter_choice", "option_text", "perplexity", "perplexity_seen",
]  # fmt: skip


def section(tasks: list, **more: object) -> Evaluate:
    return Evaluate.model_validate({"tasks": tasks, "examples": 3, "sentences": 3, **more})


def test_every_task_at_every_size() -> None:
    prompts = make_prompts(section(EVERY), 0, tokenizer=pico_tokenizer())
    named = [*prompts.choices, *prompts.generation, *prompts.texts]
    assert named == [
        "kv_retrieval/3", "mqar/4", "phonebook/4", "json_kv/3", "multi_hop/9", "needle_single/320/0",
        "needle_single/320/0.5", "needle_multi_key/320/1", "needle_multi_value/320/0.25", "needle_multi_query/350/0.5",
        "letter_choice", "option_text", "copying/3", "copying/4", "perplexity", "perplexity_seen",
    ]  # fmt: skip
    assert prompts.num_tasks == len(named)
    for of_kind in (prompts.choices, prompts.generation, prompts.texts):
        for task, documents in of_kind.items():
            assert len(documents) == 3 and {d.task for d in documents} <= {task.partition("/")[0], "sentence"}, task
    given = section(EVERY, generate=["mqar"])
    assert Evaluate.model_validate(given.model_dump(mode="json")) == given
    assert Evaluate().model_dump(mode="json")["tasks"] == [entry.task for entry in DEFAULT_TASKS]


def test_prompts_are_the_same_whatever_stands_beside_them() -> None:
    def texts(given: Evaluate, task: str) -> list[Document]:
        return list(make_prompts(given, 4, tokenizer=pico_tokenizer()).choices[task])

    alone = texts(section([{"task": "multi_hop", "pairs": [8]}]), "multi_hop/8")
    assert alone == texts(section(["letter_choice", {"task": "multi_hop", "pairs": [4, 8]}]), "multi_hop/8")
    more = section(["kv_retrieval"], pairs=[4], examples=5)
    assert texts(section(["kv_retrieval"], pairs=[4, 6]), "kv_retrieval/4") == texts(more, "kv_retrieval/4")[:3]


def test_what_cannot_be_generated_is_refused() -> None:
    needle = {"task": "needle_single", "name": "second", "tokens": [5], "depths": [0.5]}
    with pytest.raises(ProbeError, match=r"^evaluate\.tasks\.1\.tokens: 5\. The question"):
        make_prompts(section(["letter_choice", needle]), 0, tokenizer=pico_tokenizer())
    for task in ("mqar", "phonebook", "needle_single"):
        with pytest.raises(ProbeError, match="tokenizer"):
            make_prompts(section([task], pairs=[4]), 0)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"tasks": ["kv_retrieval", {"task": "kv_retrieval", "pairs": [4]}]}, "`tasks` lists kv_retrieval twice"),
        ({"tasks": [{"task": "mqar", "hops": 3}]}, "mqar does not use `hops`"),
        ({"tasks": [{"task": "closed_book", "examples": 3}]}, "does not use `examples`"),
        ({"tasks": [{"task": "kv_retrieval", "tokens": [512, 600]}]}, "does not use `tokens`"),
        ({"tasks": ["letter_choice"], "generate": ["kv_retrieval"]}, "not among"),
        ({"generate": ["perplexity"]}, "not among"),
        ({"tasks": ["no_such"]}, "Unknown task"),
        ({"tasks": ["sentence"]}, "Unknown task"),
        ({"tasks": [{"task": "json_kv", "pairs": [4, 91]}]}, "takes 2 to 90 `pairs`, not 4 to 91"),
        ({"tasks": ["json_kv"], "pairs": [96]}, "takes 2 to 90 `pairs`, not 96"),
    ]
    for given, why in refused:
        with pytest.raises(ValidationError, match=why):
            Evaluate.model_validate(given)


def test_the_question_is_that_of_the_second_reading() -> None:
    options = Options(pairs=4, questions=1, needles=3, tokens=320, tokenizer=pico_tokenizer())
    for task in ("kv_retrieval", "records", "needle_multi_query", "closed_book"):
        given = PROBES[task].evaluation_set()
        once = given[0] if given else PROBES[task].generate(rng_of(task), "eval", options)
        twice = read_twice(once)
        shift = len(twice.text) - len(once.text)
        assert twice.text.endswith(once.text) and twice.text[: shift - 1] == once.text[: shift - 1], task
        assert twice.text[shift - 1] == "\n"
        for question, moved in zip(once.questions, twice.questions, strict=True):
            for name in ("answer", "segment", "value"):
                span, other = getattr(question, name), getattr(moved, name)
                assert (span is None) == (other is None)
                if span is not None:
                    assert other[0] >= shift and once.text[slice(*span)] == twice.text[slice(*other)], (task, name)
            assert moved.choices == question.choices and moved.gold == question.gold
        first = min(question.answer[0] for question in once.questions)
        assert shift == first + 1 or len(once.questions) > 1, "no answer stands in the first reading"
        assert read_twice(begun(once), "<s>") == begun(twice), "one BOS"


def begun(document: Document) -> Document:
    """As a chat template may write it."""
    moved = [
        replace(q, **{n: s and (s[0] + 3, s[1] + 3) for n in ("answer", "segment", "value") for s in [getattr(q, n)]})
        for q in document.questions
    ]
    return Document(document.task, f"<s>{document.text}", tuple(moved))


def test_every_task_with_answers_is_measured_twice_and_no_text() -> None:
    given = Evaluate(tasks=("kv_retrieval", "closed_book", "perplexity"), pairs=(4,), examples=5, sentences=3)
    tokenizer, model = pico_tokenizer(), pico_base(vocab_size=1024)
    prompts = make_prompts(given, 0, tokenizer=tokenizer)
    twice = prompts_twice(prompts)
    arms = [evaluate_model(model, tokenizer, given, 0, p) for p in (prompts, twice)]
    assert arms[0].correct.keys() == arms[1].correct.keys() == {"kv_retrieval/4", "closed_book"}
    assert "perplexity" in arms[0].summary and "perplexity" not in arms[1].summary
    for task in prompts.choices:
        widths = [p.batches(task, tokenizer, 5, with_answers=False)[0].input_ids.shape[1] for p in (prompts, twice)]
        assert widths[0] < widths[1] and len(arms[1].correct[task]) == len(prompts.choices[task]), task
