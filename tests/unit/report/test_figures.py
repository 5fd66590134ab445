"""Figures: every file is written, the CSV holds what was given, bytes repeat."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from surgery.recipe.methods import Column, all_columns
from surgery.report.figures import heatmaps
from surgery.report.figures.attention import attention_map
from surgery.report.figures.by_value import held_out_accuracy, results_by_value, tasks_by_part
from surgery.report.figures.costs import costs_by_length
from surgery.report.figures.curves import accuracy_by_pairs, training_curve
from surgery.report.figures.heatmaps import head_maps, panel_columns
from surgery.types import Interval
from tests.support.reports import ARMS as COSTS
from tests.support.reports import EFFECTS, head_set


def points(*accuracies: float) -> dict[str, dict[str, float]]:
    return {str(4 * 2**i): {"accuracy": a, "low": a - 0.05, "high": a, "n": 50} for i, a in enumerate(accuracies)}


def tasks(accuracy: float, perplexity: float = 2.0) -> dict[str, Any]:
    return {**dict.fromkeys(("kv_retrieval", "closed_book", "mine"), points(accuracy)["4"]), "perplexity": perplexity}


def sweep_row(values: dict[str, Any], accuracy: float = 0.5, teacher: bool = False) -> dict[str, Any]:
    estimate = {"value": accuracy, "low": accuracy - 0.05, "high": accuracy + 0.05}
    return {
        "values": values, "seeds": [0], "accuracy": {"retrieval": estimate, "knowledge": estimate},
        "share_of_teacher": {"retrieval": estimate} if teacher else {},
        "kv_bytes_per_token": estimate, "state_bytes": estimate, "new_parameters": estimate,
    }  # fmt: skip


ARMS = {"base": points(0.9, 0.5, 0.2), "hybrid": points(1.0, 0.95, 0.9), "random_head": points(0.9, 0.6)}
TOKENS = ["Mem", "orize", ":", "\n", "$a$", ":", " 42", "\n", "a", " is"]
SHARES = np.array([0.1, 0, 0, 0, 0, 0, 0, 0.9, 0, 0])
HISTORY = [
    {"step": s, "loss": 3 / s + 0.1, "answer": 3 / s, "keep": 0.1 * (s > 1), "seconds": 0.1} for s in range(1, 90)
]
CHANCE = {"kv_retrieval": 0.1, "closed_book": 0.06}
SITES = {"1": tasks(0.2, 300.0), "2": tasks(0.9)}
DRAW: dict[str, Callable[[Path], list[Path]]] = {
    "head_maps": lambda folder: head_maps(head_set(), folder),
    "accuracy_by_pairs": lambda folder: accuracy_by_pairs(ARMS, folder, (4, 8)),
    "attention_L1H2": lambda folder: attention_map(
        {"before": SHARES[::-1], "after": SHARES}, TOKENS, {"segment end": 7}, folder, "L1H2"
    ),
    "training": lambda folder: training_curve(HISTORY, folder),
    "held_out_accuracy": lambda folder: held_out_accuracy({"$rows$.jsonl": {"base": points(0.0)["4"]}}, {}, folder),
    "efficiency": lambda folder: costs_by_length({name: costs[:2] for name, costs in COSTS.items()}, folder, "cpu"),
    "prune": lambda folder: tasks_by_part("prune", tasks(0.95), SITES, CHANCE, folder, 2),
    "tasks_by_arm": lambda folder: tasks_by_part(
        "tasks_by_arm", tasks(0.9), {"one_head_off": tasks(0.4)}, CHANCE, folder
    ),
    "sweep": lambda folder: results_by_value([sweep_row({"seed": n}) for n in (0, 1)], ["seed"], folder),
}


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures that were drawn and not saved, which takes most of the time."""
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    return drawn


def texts(figure: Figure) -> set[str]:
    return {text.get_text() for text in figure.findobj(Text)}


@pytest.mark.parametrize("stem", DRAW)
def test_same_input_same_bytes_in_three_files_whatever_the_users_settings(stem: str, tmp_path: Path) -> None:
    first = DRAW[stem](tmp_path / "new" / "folder")
    assert [p.name for p in first] == [f"{stem}.png", f"{stem}.svg", f"{stem}.csv"]
    assert first[0].read_bytes().startswith(b"\x89PNG") and b"</svg>" in first[1].read_bytes()
    with matplotlib.rc_context({"backend": "svg", "font.size": 20, "axes.facecolor": "black", "svg.hashsalt": None}):
        second = DRAW[stem](tmp_path / "b")
        assert (matplotlib.rcParams["font.size"], matplotlib.get_backend()) == (20, "svg")
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


# ---- head maps


def test_panels_are_what_was_measured(tmp_path: Path, figures: list[Figure], monkeypatch: pytest.MonkeyPatch) -> None:
    assert [column.name for column in panel_columns(head_set())] == EFFECTS
    heads = head_set()
    columns = {
        name: Column(name, "of a plugin", unit) for name, unit in (("entropy", "share"), ("attribution", "logits"))
    }
    monkeypatch.setattr(heatmaps, "all_columns", lambda: all_columns() | columns)
    more = {"entropy": Interval(0.5, 0.4, 0.6, 50), "attribution": Interval(40.0, 30.0, 50.0, 50)}
    heads = replace(heads, heads=tuple(replace(s, scores={**s.scores, **more}) for s in heads.heads))
    assert {"entropy", "attribution_low"} <= set(rows_of(head_maps(heads, tmp_path)[2])[0])
    # Columns with an effect keep their scale; the others have one for each unit.
    scales = {
        "Attention pattern (0 to 1); colours from −0.5 to 0.5", "Answer margin (logits); colours from −40 to 40"
    }  # fmt: skip
    assert scales <= texts(figures[0])


@pytest.mark.usefixtures("figures")
def test_what_was_not_measured_is_left_empty(tmp_path: Path) -> None:
    first, second, _, *rest = head_set().heads
    lacking = replace(first, scores={name: score for name, score in first.scores.items() if name != "ablation"})
    without = {name: score for name, score in first.scores.items() if name not in ("ablation", "context")}
    rows = rows_of(head_maps(replace(head_set(), heads=(lacking, second, *rest)), tmp_path)[2])
    assert [row["head"] for row in rows if row["ablation"] == ""] == ["L0H0"] and len(rows) == 5
    none = tuple(replace(s, scores={}) for s in head_set().heads)
    assert len(rows_of(head_maps(replace(head_set(), heads=none, chosen=()), tmp_path)[2])) == 6
    of_query = tuple(replace(s, scores=without) for s in head_set().heads)
    rows = rows_of(head_maps(replace(head_set(), heads=of_query, chosen=()), tmp_path)[2])
    assert not any("ablation" in row for row in rows) and all(row["query"] for row in rows)


@pytest.mark.usefixtures("figures")
def test_attention_heads_have_rows_of_their_own(tmp_path: Path) -> None:
    found = head_set()
    beside = tuple(replace(s, head=replace(s.head, letter="A")) for s in found.heads)
    rows = rows_of(head_maps(replace(found, heads=found.heads + beside), tmp_path)[2])
    assert {"L1H0", "L1A0"} <= {row["head"] for row in rows} and len(rows) == 2 * len(found.heads)


# ---- curves


@pytest.mark.usefixtures("figures")
def test_tables_hold_every_number(tmp_path: Path) -> None:
    rows = rows_of(accuracy_by_pairs(ARMS, tmp_path, (4, 8))[2])
    found = {(r["arm"], r["pairs"]): {k: float(r[k]) for k in ("accuracy", "low", "high", "n")} for r in rows}
    assert found == {(arm, k): v for arm, given in ARMS.items() for k, v in given.items()}
    rows = rows_of(DRAW["attention_L1H2"](tmp_path)[2])
    assert [r["token"] for r in rows] == TOKENS and [r["mark"] for r in rows].index("segment end") == 7
    assert [float(r["after"]) for r in rows] == list(SHARES)
    rows = rows_of(training_curve(HISTORY, tmp_path, "control")[2])
    assert [{k: float(v) for k, v in r.items()} for r in rows] == HISTORY
    rows = rows_of(costs_by_length(COSTS, tmp_path, "cpu")[2])
    assert len(rows) == 12 and float(rows[1]["prefill_tokens_per_second"]) == 164.0
    rows = rows_of(DRAW["prune"](tmp_path)[2])
    assert [row["arm"] for row in rows[::4]] == ["base", "1", "2"]
    assert [row["accuracy"] for row in rows if row["task"] == "kv_retrieval"] == ["0.95", "0.2", "0.9"]
    assert [row["accuracy"] for row in rows if row["task"] == "perplexity"] == ["2.0", "300.0", "2.0"]


@pytest.mark.usefixtures("figures")
def test_training_curve_of_few_zero_or_missing_losses(tmp_path: Path) -> None:
    for history in (HISTORY[:1], [{"step": 1, "loss": 0.0}], [*HISTORY[:3], {"step": 4, "text": 1.0}]):
        assert len(rows_of(training_curve(history, tmp_path)[2])) == len(history), history


def test_bold_lines_do_not_average_over_stages(tmp_path: Path, figures: list[Figure]) -> None:
    read = [{"step": s, "loss": 1.0, "attention": 1.0} for s in range(1, 51)]
    answer = [{"step": s, "loss": 0.5, "answer": 0.25, "attention": 0.25} for s in range(51, 101)]
    training_curve([*read, *answer], tmp_path)
    drawn = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in figures[0].axes[0].lines])
    assert set(drawn[np.isfinite(drawn)]) == {1.0, 0.5, 0.25}


# ---- sweeps


def test_a_second_key_gives_series_and_a_teacher_a_panel(tmp_path: Path, figures: list[Figure]) -> None:
    keys = ["splice.num_heads", "splice.select", "seed"]
    values = [{"splice.num_heads": n, "splice.select": s} for n in (1, 2) for s in ("sharpen", "random")]
    table = rows_of(results_by_value([sweep_row(value, 0.5, True) for value in values], keys, tmp_path)[2])
    assert "select=sharpen" in texts(figures[0]) and "mean over seeds" in " ".join(texts(figures[0]))
    assert "retrieval tasks: share of the teacher's accuracy" in {row["result"] for row in table}
