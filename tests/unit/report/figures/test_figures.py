"""Figures: every file is written, the CSV holds what was given, bytes repeat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.image import imread

from surgery.report.figures.attention import attention_map
from surgery.report.figures.by_value import results_by_value
from surgery.report.figures.costs import costs_by_length
from surgery.report.figures.curves import accuracy_by_pairs, training_curve
from surgery.report.figures.heatmaps import head_maps, panel_columns
from surgery.report.figures.own_data import held_out_accuracy
from surgery.report.figures.tasks import tasks_by_site
from surgery.types import HeadId, HeadSet, Interval
from tests.support.reports import ARMS as COSTS
from tests.support.reports import EFFECTS, head_set
from tests.unit.report.figures.test_by_value import row as result
from tests.unit.report.figures.test_tasks import rows_of, tasks


def points(*accuracies: float) -> dict[str, dict[str, float]]:
    return {str(4 * 2**i): {"accuracy": a, "low": a - 0.05, "high": a, "n": 50} for i, a in enumerate(accuracies)}


ARMS = {"base": points(0.9, 0.5, 0.2), "hybrid": points(1.0, 0.95, 0.9), "random_head": points(0.9, 0.6)}
TOKENS = ["Mem", "orize", ":", "\n", "$a$", ":", " 42", "\n", "a", " is"]
HISTORY = [
    {"step": s, "loss": 3 / s + 0.1, "answer": 3 / s, "keep": 0.1 * (s > 1), "seconds": 0.1} for s in range(1, 90)
]


def attention(peak: int, length: int = len(TOKENS)) -> np.ndarray:
    row = np.full(length, 0.1 / (length - 1))
    row[peak] = 0.9
    return row


DRAW: dict[str, Callable[[Path], list[Path]]] = {
    "head_maps": lambda folder: head_maps(head_set(), folder),
    "accuracy_by_pairs": lambda folder: accuracy_by_pairs(ARMS, folder, (4, 8)),
    "attention_L1H2": lambda folder: attention_map(
        {"before training": attention(0), "after training": attention(7)}, TOKENS, {"segment end": 7}, folder, "L1H2"
    ),
    "training": lambda folder: training_curve(HISTORY, folder),
    "held_out_accuracy": lambda folder: held_out_accuracy(
        {"$rows$.jsonl": {"hybrid": points(0.9)["4"], "base": points(0.0)["4"]}}, {"base": "before"}, folder
    ),
    "efficiency": lambda folder: costs_by_length(COSTS, folder, "cpu"),
    "drop_one": lambda folder: tasks_by_site("drop_one", tasks(1.0), {"0": tasks(0.2), "1": tasks(0.9)}, {}, folder),
    "sweep": lambda folder: results_by_value([result({"seed": n}, 0.5) for n in (0, 1)], ["seed"], folder),
}


@pytest.mark.parametrize("stem", DRAW)
def test_writes_png_svg_and_csv_of_one_stem(stem: str, tmp_path: Path) -> None:
    paths = DRAW[stem](tmp_path / "new" / "folder")
    assert [p.name for p in paths] == [f"{stem}.png", f"{stem}.svg", f"{stem}.csv"]
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == sorted(p.name for p in paths)
    assert paths[0].read_bytes().startswith(b"\x89PNG") and b"</svg>" in paths[1].read_bytes()


@pytest.mark.parametrize("stem", DRAW)
def test_same_input_same_bytes_whatever_the_users_settings(stem: str, tmp_path: Path) -> None:
    first = DRAW[stem](tmp_path / "a")
    with matplotlib.rc_context({"backend": "svg", "font.size": 20, "axes.facecolor": "black", "svg.hashsalt": None}):
        second = DRAW[stem](tmp_path / "b")
        assert (matplotlib.rcParams["font.size"], matplotlib.get_backend()) == (20, "svg")
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


def test_panels_are_the_default_columns_and_what_else_was_measured(tmp_path: Path) -> None:
    assert [column.name for column in panel_columns(head_set())] == EFFECTS
    heads = head_set()
    more = {"entropy": Interval(0.5, 0.4, 0.6, 50), "attribution": Interval(40.0, 30.0, 50.0, 50)}
    heads = replace(heads, heads=tuple(replace(s, scores={**s.scores, **more}) for s in heads.heads))
    png, svg, table = head_maps(heads, tmp_path)
    assert {"entropy", "attribution_low"} <= set(rows_of(table)[0])
    text = svg.read_text()
    # Columns with an effect keep their scale; the others have one for each unit.
    assert "Attention pattern (0 to 1); colours from −0.5 to 0.5" in text
    assert "Answer margin (logits); colours from −40 to 40" in text
    assert imread(png).shape[0] > imread(head_maps(head_set(), tmp_path / "default")[0]).shape[0]


@pytest.mark.parametrize("layers, heads", [(1, 1), (4, 8), (24, 24), (64, 80)])
def test_head_maps_of_any_geometry(layers: int, heads: int, tmp_path: Path) -> None:
    last = layers * heads - 1
    png, svg, table = head_maps(head_set(layers, heads, tuple({last, last // 2})), tmp_path)
    assert len(rows_of(table)) == layers * heads and png.stat().st_size and svg.stat().st_size
    assert imread(png).shape[1] < 30 * 30  # pixels; no figure is wider than 30 inches


def test_head_maps_draws_layers_without_heads_between(tmp_path: Path) -> None:
    given = head_set(3, 2, ())
    sparse = HeadSet(**{**vars(given), "heads": tuple(s for s in given.heads if s.head != HeadId(1, 1))})
    assert len(rows_of(head_maps(sparse, tmp_path)[2])) == 5


def test_accuracy_csv_holds_every_point(tmp_path: Path) -> None:
    rows = rows_of(accuracy_by_pairs(ARMS, tmp_path, (4, 8))[2])
    found = {(r["arm"], r["pairs"]): {k: float(r[k]) for k in ("accuracy", "low", "high", "n")} for r in rows}
    assert found == {(arm, k): v for arm, given in ARMS.items() for k, v in given.items()}


def test_attention_csv_holds_tokens_marks_and_shares(tmp_path: Path) -> None:
    rows = rows_of(attention_map({"after": attention(7)}, TOKENS, {"segment end": 7}, tmp_path, "L1H2")[2])
    assert [r["token"] for r in rows] == TOKENS and [r["mark"] for r in rows].index("segment end") == 7
    assert [float(r["after"]) for r in rows] == list(attention(7))


def test_attention_wraps_a_long_prompt_after_newlines(tmp_path: Path) -> None:
    from surgery.report.figures.attention import _wrap

    tokens = (["key", ":", "7", "\n"] * 33)[:130]
    lines = _wrap(tokens, 39)
    assert [a for a, _ in lines[1:]] == [b for _, b in lines[:-1]] and (lines[0][0], lines[-1][1]) == (0, 130)
    assert all(b - a <= 39 for a, b in lines) and all(tokens[b - 1] == "\n" for _, b in lines[:-1])
    assert _wrap(["x"] * 130, 40) == [(0, 40), (40, 80), (80, 120), (120, 130)]
    attention_map({"after": attention(3, 130)}, tokens, {"query": 129, "segment end": 3}, tmp_path, "L1H2")


def test_training_csv_holds_the_history(tmp_path: Path) -> None:
    rows = rows_of(training_curve(HISTORY, tmp_path, "control")[2])
    assert [{k: float(v) for k, v in r.items()} for r in rows] == HISTORY


@pytest.mark.parametrize("history", [HISTORY[:1], [{"step": 1, "loss": 0.0}], [*HISTORY[:3], {"step": 4, "text": 1.0}]])
def test_training_curve_of_few_zero_or_missing_losses(history: list[dict[str, float]], tmp_path: Path) -> None:
    assert len(rows_of(training_curve(history, tmp_path)[2])) == len(history)


_FIRST, *_REST = head_set().heads
_LACKING = replace(_FIRST, scores={k: v for k, v in _FIRST.scores.items() if k != "ablation"})
PARTLY = replace(head_set(), heads=(_LACKING, *_REST))


def test_what_was_not_measured_is_left_empty(tmp_path: Path) -> None:
    everywhere = head_set()
    query = tuple(
        replace(s, scores={k: v for k, v in s.scores.items() if k not in ("ablation", "context")})
        for s in everywhere.heads
    )
    rows = rows_of(head_maps(replace(everywhere, heads=query, chosen=()), tmp_path)[2])
    assert not any("ablation" in row for row in rows) and all(row["query"] for row in rows)


def test_a_head_without_a_score_has_an_empty_cell(tmp_path: Path) -> None:
    rows = rows_of(head_maps(PARTLY, tmp_path)[2])
    assert [row["head"] for row in rows if row["ablation"] == ""] == ["L0H0"]


def test_attention_heads_have_rows_of_their_own(tmp_path: Path) -> None:
    found = head_set()
    beside = tuple(replace(s, head=replace(s.head, letter="A")) for s in found.heads)
    head_maps(replace(found, heads=found.heads + beside), tmp_path)
    rows = rows_of(tmp_path / "head_maps.csv")
    assert len({row["head"] for row in rows}) == 2 * len(found.heads)
    assert {"L1H0", "L1A0"} <= {row["head"] for row in rows}
