"""The bench of training steps, in two rounds: it compares what it says. How fast is its own business."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.speed import train as bench


def test_both_comparisons_are_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shares, compare = [], bench.compare

    def noted(*given: Any) -> Any:
        shares.append([stage.targets.prefix is not None for stage in given[:2]])
        return compare(*given)

    monkeypatch.setattr(bench, "compare", noted)
    out = tmp_path / "train.json"
    assert bench.main(["--quick", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    hybrid, shared = found["hybrid against base"], found["shared prefix against none"]
    assert shares == [[False, False], [False, True]]
    assert hybrid["bytes"][1] > hybrid["bytes"][0], "a branch keeps activations of its own"
    assert shared["time_ratio"] > 0 and shared["memory_ratio"] <= 1.01
    assert capsys.readouterr().out.count("MiB") == 4
