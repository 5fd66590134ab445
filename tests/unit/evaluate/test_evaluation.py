"""One arm evaluated: what is refused before any prompt, the summary, and held-out rows side by side."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from surgery.data.generation import ExactAnswers
from surgery.data.ranking import LARGEST
from surgery.errors import ModelError, RunError
from surgery.evaluate.evaluation import compare_arms, evaluate_model, examples_of, mark_seen, side_by_side
from surgery.evaluate.prompts import make_prompts
from surgery.probes.documents import Document, Question
from surgery.probes.registry import PROBES
from surgery.recipe import Evaluate, Train
from surgery.report.results import cell_of, entries, label_of
from tests.support.errors import NO_MEMORY, failing
from tests.support.pico import pico_base, pico_tokenizer

FEW = Evaluate.model_validate({"pairs": [2], "examples": 4, "sentences": 3, "tasks": ["kv_retrieval", "perplexity"]})


def test_errors_name_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pico_base(vocab_size=61, layers=1)
    monkeypatch.setattr(model, "forward", failing(AssertionError("asked")))
    with pytest.raises(ModelError, match=r"base\.tokenizer: its largest token id is 972, but the model has 61"):
        evaluate_model(model, pico_tokenizer(), FEW)
    model = pico_base(vocab_size=1024, layers=1)
    for error in NO_MEMORY:
        monkeypatch.setattr(model, "forward", failing(error))
        with pytest.raises(RunError, match=rf"evaluate\.batch_size: {FEW.batch_size}\. Out of memory\. Lower it"):
            evaluate_model(model.train(), pico_tokenizer(), FEW)
        assert model.training, "left in its mode"
    monkeypatch.setattr(model, "forward", failing(RuntimeError("shapes cannot be multiplied")))
    with pytest.raises(RuntimeError, match="multiplied"):
        evaluate_model(model, pico_tokenizer(), FEW)


def test_results_are_json_and_readable_however_large_a_loss() -> None:
    prompts = make_prompts(FEW, 0, {"mine": make_prompts(FEW, 1).texts["perplexity"]})
    for factor, diverged in ((1.0, False), (1e3, True), (1e25, True)):
        model = pico_base(vocab_size=1024, layers=1)
        model.lm_head.weight.data.mul_(factor)
        summary = evaluate_model(model, pico_tokenizer(), FEW, prompts=prompts).summary
        assert json.loads(json.dumps(summary, allow_nan=False)) == summary
        values = {summary["perplexity"], summary["held_out"]["mine"]["perplexity"]}
        assert (values == {LARGEST}) == diverged, factor
        notes = [note.split(":")[0] for note in summary.get("notes", [])]
        assert notes == (["perplexity", "held_out/mine"] if diverged else [])
        cells = {path: cell_of(entry) for path, entry in entries(summary)}
        assert set(cells) == {("kv_retrieval", "2"), ("perplexity",), ("held_out", "mine")}
        assert all(len(cell) < 25 for cell in cells.values())


def test_the_summary_has_every_task_in_its_place() -> None:
    tasks = [
        {"task": "kv_retrieval", "pairs": [3]}, {"task": "copying", "pairs": [3]}, "letter_choice", "perplexity",
        {"task": "needle_single", "tokens": [320], "depths": [0.5]},
    ]  # fmt: skip
    given = Evaluate.model_validate({"tasks": tasks, "examples": 3, "sentences": 3, "generate": ["kv_retrieval"]})
    model = pico_base(vocab_size=1024, layers=1)
    arm = evaluate_model(model, pico_tokenizer(), given, 0)
    assert set(arm.summary) == {"kv_retrieval", "copying", "letter_choice", "perplexity", "needle_single"}
    assert set(arm.summary["kv_retrieval"]["3"]["generated"]) == {"accuracy", "low", "high", "n", "begun"}
    assert arm.summary["kv_retrieval"]["3"]["chance"] == pytest.approx(1 / 3)
    assert "generated" not in arm.summary["letter_choice"] and arm.summary["needle_single"]["320"]["0.5"]["n"] == 3
    per_token = arm.summary["copying"]["3"]["per_token"]
    assert 0 <= per_token["low"] <= per_token["mean"] <= per_token["high"] <= 1
    named = ["kv_retrieval/3", "kv_retrieval/3/generated", "letter_choice", "needle_single/320/0.5", "copying/3"]
    assert list(arm.correct) == named
    ranked = evaluate_model(model, pico_tokenizer(), given.model_copy(update={"generate": False}), 0)
    assert all(torch.equal(ranked.correct[task], arm.correct[task]) for task in ranked.correct), "as without generation"


def test_comparisons_and_the_gap_need_the_arms_they_are_of() -> None:
    given = Evaluate.model_validate({"tasks": ["letter_choice"], "examples": 20})
    arms = {name: evaluate_model(pico_base(i, vocab_size=1024, layers=1), pico_tokenizer(), given, 0)
            for i, name in enumerate(["base", "no_splice", "hybrid", "teacher"])}  # fmt: skip
    found = compare_arms(arms)
    assert list(found["comparisons"]["hybrid"]) == ["base", "no_splice", "teacher"]
    assert set(found["gap_closed"]) == {"letter_choice"}
    del arms["teacher"], arms["no_splice"]
    arms["base_read_twice"] = arms["base"]
    found = compare_arms(arms)
    assert "gap_closed" not in found and list(found["comparisons"]["hybrid"]) == ["base", "base_read_twice"]


def test_facts_of_both_halves_in_training_are_marked_as_seen() -> None:
    section = Evaluate.model_validate(
        {"tasks": ["closed_book", "closed_book_seen", {"task": "closed_book", "name": "again"}, "perplexity"]}
    )
    for task, split, seen in (
        ("closed_book", 0, False), ("closed_book", 1, True), ("closed_book", None, True), ("statement", None, True),
        ("letter_choice", 1, True), ("option_text", None, True), ("option_text", 0, False), ("sentence", None, False),
    ):  # fmt: skip
        source = {"task": task, "split": split, "rows": 1, "weights": {"lm": 1.0}}
        stages = [{"name": "first", "sources": [source]}, {"name": "last", "sources": [source | {"task": "sentence"}]}]
        facts = {name: {"accuracy": 1.0} for name in ("closed_book", "closed_book_seen", "again")}
        summary: dict[str, Any] = {**facts, "perplexity": 2.0}
        summary["closed_book"]["generated"] = {"accuracy": 1.0}
        mark_seen(summary, section, Train.model_validate({"stages": stages}))
        half, after = ("other half", ", seen in training") if seen else ("held-out half", "")
        assert {place: label_of(place, entry) for place, entry in entries(summary)} == {
            ("closed_book",): f"closed-book facts, {half}{after}",
            ("closed_book", "generated"): f"closed-book facts, {half}, generated{after}",
            ("closed_book_seen",): "closed-book facts, half seen in training",
            ("again",): f"again{after}",
            ("perplexity",): "perplexity, held-out",
        }, (task, split)


def test_what_was_seen_is_marked_at_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task of a plugin may have sizes."""
    monkeypatch.setattr(PROBES["records"], "held_out_from", ("records",))
    train = Train.model_validate({"sources": [{"task": "records", "rows": 1, "weights": {"lm": 1.0}}]})
    summary = {"records": {"4": {"accuracy": 1.0, "generated": {"accuracy": 1.0}}, "8": {"accuracy": 0.5}}}
    mark_seen(summary, Evaluate.model_validate({"tasks": ["records"], "pairs": [4, 8]}), train)
    assert all(entry["seen"] for _, entry in entries(summary)) and "seen" not in summary["records"]


def answers(count: int) -> tuple[list[Document], ExactAnswers]:
    documents = []
    for i in range(count):
        prompt = f"prompt {i}: "
        documents.append(Document("rows", f"{prompt}{i}<end>", (Question((len(prompt), len(prompt) + 6), (), -1),)))
    wrong = torch.zeros(count, dtype=torch.bool)
    return documents, ExactAnswers(wrong, wrong, [str(i) for i in range(count)], [f"not {i}" for i in range(count)])


def test_a_dozen_held_out_rows_spread_over_all_are_joined_by_row() -> None:
    for count in (1, 5, 12, 13, 200):
        examples = examples_of(*answers(count))
        numbers = [int(example["wanted"]) for example in examples]
        assert len(numbers) == min(12, count) and numbers == sorted(set(numbers)), count
        assert numbers[0] == 0 and numbers[-1] >= count - count // 12 - 1, count
    documents, first = answers(2)
    second = ExactAnswers(first.correct, first.first_token, first.wanted, ["a", "b"])
    arms = {
        "base": {"rows": examples_of(documents, first)},
        "hybrid": {"rows": examples_of(documents, second)},
        "x": {},
    }
    assert side_by_side(arms) == {
        "rows": [
            {"prompt": "prompt 0: ", "wanted": "0", "generated": {"base": "not 0", "hybrid": "a"}},
            {"prompt": "prompt 1: ", "wanted": "1", "generated": {"base": "not 1", "hybrid": "b"}},
        ]
    }
    assert side_by_side({"base": {}, "hybrid": {}}) == {}
    prompt = "start" + "x" * 100_000 + "end?"
    document = Document("rows", prompt + "7", (Question((len(prompt), len(prompt) + 1), (), -1),))
    (example,) = examples_of([document], ExactAnswers(torch.ones(1), torch.ones(1), ["7"], ["7"]))
    assert len(example["prompt"]) == 2000 and example["prompt"].startswith("start")
    assert example["prompt"].endswith("end?")
