"""The picture of what models cost."""

from __future__ import annotations

import csv
from pathlib import Path

from surgery.report.figures.costs import costs_by_length
from tests.support.reports import ARMS


def test_the_numbers_lie_beside_the_picture(tmp_path: Path) -> None:
    paths = costs_by_length(ARMS, tmp_path, "cpu")
    assert [path.name for path in paths] == ["efficiency.png", "efficiency.svg", "efficiency.csv"]
    rows = list(csv.DictReader(paths[2].open()))
    assert len(rows) == 12
    assert {row["arm"] for row in rows} == set(ARMS)
    assert float(rows[1]["prefill_tokens_per_second"]) == 164.0


def test_every_arm_is_named_in_the_legend(tmp_path: Path) -> None:
    svg = costs_by_length(ARMS, tmp_path, "cpu")[1].read_text()
    assert all(f"<!-- {name} -->" in svg for name in ("base", "hybrid", "mine"))
