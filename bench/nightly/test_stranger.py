"""The bench that converts models as a new user does, with a stand-in for the installed command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import stranger
from surgery.models.loading import load_model, load_tokenizer
from surgery.recipe import Base
from tests.integration.conftest import PICO_MAMBA2, ROOT

# Notes its arguments, writes what a run writes, and fails if its first word is `fails`.
COMMAND = """#!/bin/sh
echo "$@" >> calls
[ "$1" = "{fails}" ] && exit 2
name=$(basename "$2" .yaml)
[ "$1" = init ] && echo "name: $name"
if [ "$1" = run ]; then
  mkdir -p "runs/$name/export"
  for file in {files}; do echo '{{"heads": ["L1H2"]}}' > "runs/$name/$file"; done
fi
exit 0
"""


def command(folder: Path, fails: str = "", lacks: str = "") -> Path:
    path = folder / "surgery"
    files = " ".join(file for file in stranger.FILES if file != lacks)
    path.write_text(COMMAND.format(fails=fails, files=files))
    path.chmod(0o755)
    return path


def run(folder: Path, surgery: Path, *names: str) -> int:
    return stranger.main([str(folder / "out"), "--surgery", str(surgery), "--only", *names])


def test_every_command_of_a_case_runs_and_the_table_has_its_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, command(tmp_path), "quickstart", "mamba2") == 0
    home = tmp_path / "out" / "home"
    calls = ["run quickstart", "verify runs/quickstart/export", "init mamba2", "run mamba2.yaml"]
    assert (home / "calls").read_text().splitlines() == [*calls, "verify runs/mamba2/export"]
    assert (home / "mamba2.yaml").read_text() == "name: mamba2\n" and (home / "mamba2" / "config.json").is_file()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| mamba2")]
    assert [cell.split(",")[0] for cell in rows[0][1:4]] == ["0", "0", "0"] and rows[0][4:] == ["yes", "L1H2 |"]
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [case["name"] for case in found["cases"]] == ["quickstart", "mamba2"] and "torch" in found["versions"]


@pytest.mark.parametrize(
    ("fails", "lacks", "rcs"),
    [
        ("init", "", [2]),
        ("run", "", [0, 2]),
        ("verify", "", [0, 0, 2]),
        ("", "report.html", [0, 0, 0]),
    ],
)
def test_a_failure_is_counted_and_tried_again(fails: str, lacks: str, rcs: list[int], tmp_path: Path) -> None:
    assert run(tmp_path, command(tmp_path, fails, lacks), "mamba2") == 1
    (case,) = json.loads((tmp_path / "out" / "results.json").read_text())["cases"]
    assert [done["rc"] for done in case["commands"]] == rcs
    assert case["missing"] == (list(stranger.FILES) if len(rcs) < 3 else [lacks] * bool(lacks))
    assert run(tmp_path, command(tmp_path), "mamba2") == 0
    calls = len((tmp_path / "out" / "home" / "calls").read_text().splitlines())
    assert run(tmp_path, command(tmp_path), "mamba2") == 0, "and is not run again"
    assert len((tmp_path / "out" / "home" / "calls").read_text().splitlines()) == calls


def test_the_documented_table_is_that_of_the_committed_results() -> None:
    found = json.loads((ROOT / "paper" / "evidence" / "stranger.json").read_text(encoding="utf-8"))["cases"]
    assert [case["name"] for case in found] == list(stranger.CASES) and all(map(stranger.succeeded, found))
    assert stranger.table(found) in (ROOT / "paper" / "RELIABILITY.md").read_text(encoding="utf-8")


def test_the_base_in_mamba_ssm_s_format_is_the_shipped_one(tmp_path: Path) -> None:
    stranger.write_model(stranger.MAMBA_SSM, tmp_path / "theirs")
    assert "model_type" not in json.loads((tmp_path / "theirs" / "config.json").read_text())
    theirs, ours = (Base(model=str(folder)) for folder in (tmp_path / "theirs", PICO_MAMBA2))
    ids = load_tokenizer(theirs)("the owl is red", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(load_model(theirs)(ids).logits, load_model(ours)(ids).logits)
