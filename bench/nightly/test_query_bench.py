"""The benchmark of decode steps, on a small model: both ways give the same scores."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from bench.speed import query as bench
from surgery.locate import ablation_sweep


def test_both_ways_are_measured_and_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shares, read = [], ablation_sweep.from_shared_states

    def noted(model: Any, reads: Any, *given: Any) -> Any:
        shares.append(bool(reads))
        return read(model, reads, *given)

    monkeypatch.setattr(ablation_sweep, "from_shared_states", noted)
    out = tmp_path / "query.json"
    assert bench.main(["--quick", "--out", str(out)]) == 0
    assert [way for way, _ in groupby(shares)] == [True, False, True, False]
    rows = json.loads(out.read_text())
    assert [row["layer"] for row in rows] == [0, 1]
    for row in rows:
        assert 0 <= row["logits_apart"] < 1e-4 and len(row["ratios"]) == 1
        assert row["ratio"] == pytest.approx(row["copied"] / row["shared"]) and row["shared"] > 0
    assert capsys.readouterr().out.count("ratio") == 2
