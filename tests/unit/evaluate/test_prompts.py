"""What is asked: which tasks and sizes, the same prompts whatever else is asked, all of it scored under its name."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from surgery.errors import ProbeError
from surgery.evaluate.evaluation import compare_arms, evaluate_model
from surgery.evaluate.prompts import make_prompts
from surgery.probes.documents import Document
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
    for asked in (prompts.choices, prompts.generation, prompts.texts):
        for task, documents in asked.items():
            assert len(documents) == 3 and {d.task for d in documents} <= {task.partition("/")[0], "sentence"}


def test_a_task_is_asked_the_same_whatever_stands_beside_it() -> None:
    def texts(given: Evaluate, task: str) -> list[Document]:
        return list(make_prompts(given, 4, tokenizer=pico_tokenizer()).choices[task])

    alone = section([{"task": "multi_hop", "pairs": [8]}])
    assert texts(alone, "multi_hop/8") == texts(
        section(["letter_choice", {"task": "multi_hop", "pairs": [4, 8]}]), "multi_hop/8"
    )
    more = section(["kv_retrieval"], pairs=[4], examples=5)
    assert texts(section(["kv_retrieval"], pairs=[4, 6]), "kv_retrieval/4") == texts(more, "kv_retrieval/4")[:3]


def test_the_summary_has_every_task_in_its_place() -> None:
    tasks = [
        {"task": "kv_retrieval", "pairs": [3]}, {"task": "copying", "pairs": [3]}, "letter_choice", "perplexity",
        {"task": "needle_single", "tokens": [320], "depths": [0.5]},
    ]  # fmt: skip
    given = section(tasks, generate=["kv_retrieval"])
    arm = evaluate_model(pico_base(vocab_size=1024, layers=1), pico_tokenizer(), given, 0)
    assert set(arm.summary) == {"kv_retrieval", "copying", "letter_choice", "perplexity", "needle_single"}
    assert set(arm.summary["kv_retrieval"]["3"]["generated"]) == {"accuracy", "low", "high", "n", "begun"}
    assert arm.summary["kv_retrieval"]["3"]["chance"] == pytest.approx(1 / 3)
    assert "generated" not in arm.summary["letter_choice"] and arm.summary["needle_single"]["320"]["0.5"]["n"] == 3
    per_token = arm.summary["copying"]["3"]["per_token"]
    assert 0 <= per_token["low"] <= per_token["mean"] <= per_token["high"] <= 1
    assert set(arm.correct) == {
        "kv_retrieval/3",
        "kv_retrieval/3/generated",
        "copying/3",
        "letter_choice",
        "needle_single/320/0.5",
    }


def test_ranks_do_not_depend_on_whether_answers_are_said_too() -> None:
    model, kinds = pico_base(vocab_size=1024, layers=1), [{"task": "kv_retrieval", "pairs": [4]}, "letter_choice"]
    plain, said = (
        evaluate_model(model, pico_tokenizer(), section(kinds, generate=g, examples=16), 0) for g in (False, True)
    )
    assert all(torch.equal(plain.correct[task], said.correct[task]) for task in plain.correct)
    assert len(said.correct) == 2 * len(plain.correct)


def test_comparisons_and_the_gap_need_the_arms_they_are_of() -> None:
    given = section(["letter_choice"], examples=20)
    arms = {name: evaluate_model(pico_base(i, vocab_size=1024, layers=1), pico_tokenizer(), given, 0)
            for i, name in enumerate(["base", "no_splice", "hybrid", "teacher"])}  # fmt: skip
    found = compare_arms(arms)
    assert list(found["comparisons"]["hybrid"]) == ["base", "no_splice", "teacher"]
    assert set(found["gap_closed"]) == {"letter_choice"}
    del arms["teacher"], arms["no_splice"]
    arms["base_read_twice"] = arms["base"]
    found = compare_arms(arms)
    assert "gap_closed" not in found and list(found["comparisons"]["hybrid"]) == ["base", "base_read_twice"]


def test_a_length_that_does_not_fit_names_its_task() -> None:
    needle = {"task": "needle_single", "name": "second", "tokens": [5], "depths": [0.5]}
    with pytest.raises(ProbeError, match=r"^evaluate\.tasks\.1\.tokens: 5\. The question"):
        make_prompts(section(["letter_choice", needle]), 0, tokenizer=pico_tokenizer())


def test_what_depends_on_a_tokenizer_asks_for_one() -> None:
    for task in ("mqar", "phonebook", "needle_single"):
        with pytest.raises(ProbeError, match="tokenizer"):
            make_prompts(section([task], pairs=[4]), 0)


@pytest.mark.parametrize(
    ("given", "why"),
    [
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
        ({"tasks": []}, "too_short"),
    ],
)
def test_what_means_nothing_is_refused(given: dict, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        Evaluate.model_validate(given)


def test_a_recipe_says_tasks_in_short_and_reads_them_back() -> None:
    given = section(EVERY, generate=["mqar"])
    assert Evaluate.model_validate(given.model_dump(mode="json")) == given
    assert Evaluate().model_dump(mode="json")["tasks"] == [entry.task for entry in DEFAULT_TASKS]
