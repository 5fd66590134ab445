"""The card of a hybrid that was trained further: what it came from, what was held out, no path of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surgery.card import model_card, public_name, public_recipe
from surgery.families import family_of, geometry_of
from surgery.heads import Graft, Plan
from surgery.recipe import Recipe, check_recipe, to_yaml
from tests.pico import pico_config

SHARE = {"accuracy": 0.5, "low": 0.4, "high": 0.6, "n": 100}
TASKS = ("letter_choice", "option_text", "closed_book", "closed_book_seen")


def arm(value: float) -> dict[str, Any]:
    held_out = {"rows.jsonl": {**SHARE, "accuracy": value, "n": 80}, "texts.jsonl": {"perplexity": 2 + value, "n": 9}}
    return {
        "held_out": held_out,
        "kv_retrieval": {"8": SHARE},
        **dict.fromkeys(TASKS, SHARE),
        "perplexity": 2.0,
        "perplexity_seen": 2.0,
    }


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    for name in ("quick/export", "own/base", "own/teacher"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "rows.jsonl").touch()
    data = {"path": str(tmp_path / "rows.jsonl"), "holdout": 0.1}
    source = {"data": data, "rows": 2, "weights": {"answer": 1, "distil": 1}}
    given = {
        "name": "further",
        "base": {"model": str(tmp_path / "quick/export")},
        "splice": None,
        "control": {"model": str(tmp_path / "own/base")},
        "train": {"steps": 7, "sources": [source], "teacher": {"model": str(tmp_path / "own/teacher")}},
    }
    return check_recipe(given)


def plan() -> Plan:
    config = pico_config()
    graft = Graft(family_of(config).sites(config)[1], (2,), "add", "ssm", ("answer_token",))
    return Plan("quick", geometry_of(config), (graft,), 0)


def test_it_says_what_was_trained_on_what_and_shows_what_was_held_out(recipe: Recipe) -> None:
    card = model_card(recipe, None, plan(), {"arms": {"base": arm(0.1), "no_splice": arm(0.3), "hybrid": arm(0.9)}})
    assert "Fine-tuned from quick on rows.jsonl" in card
    assert "| | quick, before | base, same training | **this hybrid** |" in card
    asked = "| 0.100 [0.400, 0.600] | 0.300 [0.400, 0.600] | 0.900 [0.400, 0.600] |"
    assert f"| rows.jsonl, held-out rows, exact match {asked}" in card
    assert "| perplexity of texts.jsonl, held-out rows | 2.100 | 2.300 | 2.900 |" in card
    assert "Trained further for 7 steps on rows.jsonl, and on nothing else" in card
    assert "| L1H2 | add | ssm | answer token | unknown |" in card


def test_nothing_of_this_machine_goes_in(recipe: Recipe, tmp_path: Path) -> None:
    card = model_card(recipe, None, plan(), {"arms": {"base": arm(0.1), "hybrid": arm(0.9)}})
    for text in (card, to_yaml(public_recipe(recipe))):
        assert str(tmp_path) not in text and "rows.jsonl" in text
    assert str(tmp_path) in to_yaml(recipe), "the recipe itself stays as it is"


def test_an_export_folder_is_called_by_its_runs_name(tmp_path: Path) -> None:
    assert public_name(str(tmp_path / "quick" / "export")) == "quick"
    assert public_name(str(tmp_path / "quick" / "other")) == "other"
    assert public_name("owner/name@main") == "owner/name"
