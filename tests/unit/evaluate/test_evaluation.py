"""One arm scored: what is refused before anything is asked, and what a model that diverged leaves in its summary."""

from __future__ import annotations

import json
from typing import Any

import pytest

from surgery.errors import ModelError, RunError
from surgery.evaluate.evaluation import evaluate_model, mark_seen
from surgery.evaluate.prompts import make_prompts
from surgery.recipe import Evaluate, Train
from surgery.report.results import cell_of, entries, label_of
from surgery.scoring.ranking import LARGEST
from tests.support.errors import NO_MEMORY, failing
from tests.support.pico import pico_base, pico_tokenizer

FEW = Evaluate.model_validate({"pairs": [2], "examples": 4, "sentences": 3, "tasks": ["kv_retrieval", "perplexity"]})


def test_a_tokenizer_of_another_model_is_refused_before_anything_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pico_base(vocab_size=61, layers=1)
    monkeypatch.setattr(model, "forward", failing(AssertionError("asked")))
    with pytest.raises(ModelError, match=r"base\.tokenizer: its largest token id is 972, but the model has 61"):
        evaluate_model(model, pico_tokenizer(), FEW)


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
def test_a_lack_of_memory_names_what_to_lower(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pico_base(vocab_size=1024, layers=1)
    monkeypatch.setattr(model, "forward", failing(error))
    with pytest.raises(RunError, match=rf"evaluate\.batch_size: {FEW.batch_size}\. Out of memory\. Lower it"):
        evaluate_model(model, pico_tokenizer(), FEW)


def test_any_other_error_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pico_base(vocab_size=1024, layers=1)
    monkeypatch.setattr(model, "forward", failing(RuntimeError("shapes cannot be multiplied")))
    with pytest.raises(RuntimeError, match="multiplied"):
        evaluate_model(model, pico_tokenizer(), FEW)


@pytest.mark.parametrize(("factor", "diverged"), [(1.0, False), (1e3, True), (1e25, True)])
def test_results_are_json_and_readable_however_large_a_loss(factor: float, diverged: bool) -> None:
    model = pico_base(vocab_size=1024, layers=1)
    model.lm_head.weight.data.mul_(factor)
    prompts = make_prompts(FEW, 0, {"mine": make_prompts(FEW, 1).texts["perplexity"]})
    summary = evaluate_model(model, pico_tokenizer(), FEW, prompts=prompts).summary
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    values = {summary["perplexity"], summary["held_out"]["mine"]["perplexity"]}
    assert (values == {LARGEST}) == diverged
    notes = [note.split(":")[0] for note in summary.get("notes", [])]
    assert notes == (["perplexity", "held_out/mine"] if diverged else [])
    cells = {path: cell_of(entry) for path, entry in entries(summary)}
    assert set(cells) == {("kv_retrieval", "2"), ("perplexity",), ("held_out", "mine")}
    assert all(len(cell) < 25 for cell in cells.values())


@pytest.mark.parametrize(
    ("task", "split", "seen"),
    [
        ("closed_book", 0, False), ("closed_book", 1, True), ("closed_book", None, True), ("statement", None, True),
        ("letter_choice", 1, True), ("option_text", None, True), ("option_text", 0, False), ("sentence", None, False),
    ],
)  # fmt: skip
def test_facts_of_both_halves_in_training_are_marked_as_seen(task: str, split: int | None, seen: bool) -> None:
    section = Evaluate.model_validate(
        {"tasks": ["closed_book", "closed_book_seen", {"task": "closed_book", "name": "again"}, "perplexity"]}
    )
    source = {"task": task, "split": split, "rows": 1, "weights": {"lm": 1.0}}
    stages = [{"name": "first", "sources": [source]}, {"name": "last", "sources": [source | {"task": "sentence"}]}]
    summary = {name: {"accuracy": 1.0} for name in ("closed_book", "closed_book_seen", "again")} | {"perplexity": 2.0}
    summary["closed_book"]["generated"] = {"accuracy": 1.0}
    mark_seen(summary, section, Train.model_validate({"stages": stages}))
    labels = {place: label_of(place, entry) for place, entry in entries(summary)}
    assert labels == {
        ("closed_book",): f"closed-book facts, {'other half, seen in training' if seen else 'held-out half'}",
        ("closed_book", "generated"): (
            "closed-book facts, other half, generated, seen in training"
            if seen
            else "closed-book facts, held-out half, generated"
        ),
        ("closed_book_seen",): "closed-book facts, half seen in training",
        ("again",): "again, seen in training" if seen else "again",
        ("perplexity",): "perplexity, held-out",
    }


@pytest.mark.parametrize(("task", "split"), [("option_text", 0), ("closed_book", 0), ("statement", 1)])
def test_option_text_asks_for_facts_of_both_halves(task: str, split: int) -> None:
    section = Evaluate.model_validate({"tasks": ["option_text", "letter_choice"]})
    source = {"task": task, "split": split, "rows": 1, "weights": {"lm": 1.0}}
    summary: dict[str, Any] = {"option_text": {}, "letter_choice": {}}
    mark_seen(summary, section, Train.model_validate({"sources": [source]}))
    assert summary == {"option_text": {"seen": True}, "letter_choice": {}}
