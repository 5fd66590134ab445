"""Figures of an analysis: the CSV holds what is given, bytes repeat, many sites fit."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from surgery.report.figures.tasks import tasks_by_arm, tasks_by_site

CHANCE = {"kv_retrieval": 0.1, "letter_choice": 0.25, "closed_book": 0.06}


def tasks(accuracy: float, perplexity: float = 2.0, *more: str) -> dict[str, Any]:
    value = {"accuracy": accuracy, "low": max(0.0, accuracy - 0.1), "high": min(1.0, accuracy + 0.1), "n": 50}
    return {**dict.fromkeys(("kv_retrieval", "closed_book", *more), value), "perplexity": perplexity}


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("kind", ["prune", "drop_one", "disable_one", "swap_one"])
def test_every_sweep_is_drawn(kind: str, tmp_path: Path) -> None:
    names = ["L0H1", "L2H0"] if kind == "disable_one" else ["1", "2"]
    sites = {names[0]: tasks(0.2, 300.0), names[1]: tasks(0.9)}
    minimal = 2 if kind == "prune" else None
    first = tasks_by_site(kind, tasks(0.95), sites, CHANCE, tmp_path / "a", minimal)
    assert [p.name for p in first] == [f"{kind}.png", f"{kind}.svg", f"{kind}.csv"]
    rows = rows_of(first[2])
    assert [row["arm"] for row in rows[::3]] == ["base", *names]
    assert [row["accuracy"] for row in rows if row["task"] == "kv_retrieval"] == ["0.95", "0.2", "0.9"]
    assert [row["accuracy"] for row in rows if row["task"] == "perplexity"] == ["2.0", "300.0", "2.0"]


def test_the_minimal_model_is_marked(tmp_path: Path) -> None:
    sites = {"1": tasks(0.2), "2": tasks(0.9)}
    svg = tasks_by_site("prune", tasks(1.0), sites, CHANCE, tmp_path, minimal=2)[1].read_text(encoding="utf-8")
    assert "<!-- minimal: 2 -->" in svg and "<!-- KV-retrieval -->" in svg


def test_labels_are_left_out_where_they_do_not_fit(tmp_path: Path) -> None:
    sites = {str(i): tasks(0.5) for i in range(40)}
    svg = tasks_by_site("swap_one", tasks(1.0), sites, CHANCE, tmp_path)[1].read_text(encoding="utf-8")
    assert "<!-- 38 -->" in svg and "<!-- 39 -->" not in svg


def test_arms_and_tasks_side_by_side(tmp_path: Path) -> None:
    arms = {"base": tasks(0.9, 2.0, "phonebook"), "one_head_off": tasks(0.4, 3.0, "phonebook")}
    paths = tasks_by_arm(arms, CHANCE, tmp_path)
    svg = paths[1].read_text(encoding="utf-8")
    assert all(f"<!-- {name} -->" in svg for name in ("one head off", "KV-retrieval", "phonebook", "perplexity"))
    assert [row["arm"] for row in rows_of(paths[2])] == ["base"] * 4 + ["one_head_off"] * 4
