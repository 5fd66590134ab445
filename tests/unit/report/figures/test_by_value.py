"""The figure of a sweep: numbers on an axis, other values as points, one series for each value of a second key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes

from surgery.report.figures import by_value
from surgery.report.figures.by_value import results_by_value
from tests.unit.report.figures.test_tasks import rows_of


def row(values: dict[str, Any], accuracy: float, teacher: bool = False, seeds: int = 1) -> dict[str, Any]:
    estimate = {"value": accuracy, "low": accuracy - 0.05, "high": accuracy + 0.05}
    exact = {"value": 100 * accuracy, "low": 100 * accuracy, "high": 100 * accuracy}
    groups = {"retrieval": estimate, "knowledge": estimate}
    shares = {"retrieval": estimate} if teacher else {}
    return {
        "values": values, "seeds": [None] * seeds, "accuracy": groups, "share_of_teacher": shares,
        "kv_bytes_per_token": exact, "state_bytes": exact, "new_parameters": exact,
    }  # fmt: skip


def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[float], dict[str, Any]]]:
    """Record the positions and the options of every line."""
    lines: list[tuple[list[float], dict[str, Any]]] = []
    draw = Axes.errorbar

    def record(self: Axes, x: Any, *given: Any, **named: Any) -> Any:
        lines.append((list(x), named))
        return draw(self, x, *given, **named)

    monkeypatch.setattr(Axes, "errorbar", record)
    return lines


def test_numbers_are_joined_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = drawn(monkeypatch)
    given = [row({"splice.num_heads": n}, 0.3 + n / 20) for n in (8, 0, 1)]
    paths = results_by_value(given, ["splice.num_heads"], tmp_path)
    assert [path.name for path in paths] == ["sweep.png", "sweep.svg", "sweep.csv"]
    assert [(x, named["linestyle"]) for x, named in lines] == [([0, 1, 8], "-")] * 5
    table = rows_of(paths[2])
    assert [(r["splice.num_heads"], r["value"]) for r in table[:3]] == [("8", "0.7"), ("0", "0.3"), ("1", "0.35")]
    assert list(dict.fromkeys(r["result"] for r in table)) == [
        "retrieval tasks: accuracy", "knowledge tasks: accuracy", "KV bytes a token", "state bytes", "new weights",
    ]  # fmt: skip


def test_other_values_are_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = drawn(monkeypatch)
    given = [row({"splice.select": name}, 0.5) for name in ("sharpen", "random")]
    svg = results_by_value(given, ["splice.select"], tmp_path)[1].read_text(encoding="utf-8")
    assert [(x, named["linestyle"]) for x, named in lines] == [([0, 1], "")] * 5
    assert "<!-- sharpen -->" in svg and "<!-- random -->" in svg


def test_truth_values_are_not_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = drawn(monkeypatch)
    results_by_value([row({"train.packing": value}, 0.5) for value in (True, False)], ["train.packing"], tmp_path)
    assert {named["linestyle"] for _, named in lines} == {""}


@pytest.mark.parametrize(("values", "scale"), [((0, 1, 16), "symlog"), ((1, 4, 64), "log"), ((0, 1, 8), "linear")])
def test_numbers_of_very_different_size_get_a_log_scale(
    values: tuple[int, ...], scale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales = []
    limit = by_value._limit
    monkeypatch.setattr(
        by_value, "_limit", lambda axes, *given: (scales.append(axes.get_xscale()), limit(axes, *given))
    )
    results_by_value([row({"splice.num_heads": n}, 0.5) for n in values], ["splice.num_heads"], tmp_path)
    assert set(scales) == {scale}


def test_a_second_key_gives_series_and_a_teacher_a_panel(tmp_path: Path) -> None:
    keys = ["splice.num_heads", "splice.select", "seed"]
    given = [
        row({"splice.num_heads": n, "splice.select": s}, 0.5, True, 3) for n in (1, 2) for s in ("sharpen", "random")
    ]
    paths = results_by_value(given, keys, tmp_path)
    svg = paths[1].read_text(encoding="utf-8")
    assert "<!-- select=sharpen -->" in svg and "mean over seeds" in svg
    assert "retrieval tasks: share of the teacher's accuracy" in {r["result"] for r in rows_of(paths[2])}
