"""The bench of locating, on few prompts: both procedures measure the same thing. How fast is its own business."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.speed import locate as bench


def test_both_procedures_rank_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "locate.json"
    assert bench.main(["--quick", "--out", str(out)]) == 0
    pico, wide = json.loads(out.read_text())
    assert pico["same_ranking"] and wide["same_ranking"]
    assert (pico["heads"], pico["notebook_heads"]) == (32, 32) and wide["heads"] == 48
    for row in (pico, wide):
        assert row["notebook"]["passes"] == row["heads"] * row["pairs"] * row["prompts"]
        assert 0 < row["query"]["passes"] < row["exact"]["passes"] < row["notebook"]["passes"]
    said = capsys.readouterr().out
    assert said.count("notebook") == 2 and "peak memory" in said and "same ranking: True" in said
