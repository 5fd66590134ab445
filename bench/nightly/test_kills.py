"""The harness of `make kills`: events fire where they should, and a cell that went wrong is called so."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from bench.kills.__main__ import Ended, Matrix
from bench.kills.events import Events, Trigger

SIGNALS = {"SIGKILL": -signal.SIGKILL, "SIGTERM": -signal.SIGTERM}


def run(folder: Path, trigger: Trigger | None, record: Path | None = None) -> int:
    """Writes three files as a stage of a run does, in a child; its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a command that ran in this process has set its own
        try:
            _write(folder, Events(folder, trigger, record))
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _write(folder: Path, events: Events) -> None:
    from surgery.commands.progress import Bars

    events.watch()
    bars = Bars()
    bars.start("train", "training")
    (folder / ".one.json.surgery-1.tmp").write_text("{}")
    os.rename(folder / ".one.json.surgery-1.tmp", folder / "one.json")
    save_file({"x": torch.ones(1000)}, folder / "two.safetensors")
    bars.progress(1, 1)
    events.save()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


EVENTS = ["open .one.json.surgery-1.tmp", "os.rename .one.json.surgery-1.tmp", "half of two.safetensors", "tick 1 of 1"]


def test_a_reference_run_lists_every_event(folder: Path, tmp_path: Path) -> None:
    assert run(folder, None, tmp_path) == 0
    assert json.loads((tmp_path / "events.json").read_text()) == {"train": EVENTS}


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_comes_at_its_event(folder: Path, name: str) -> None:
    left = ([], [".one.json.surgery-1.tmp"], ["one.json", "two.safetensors"])
    for event, names in enumerate(left):
        assert run(folder, Trigger("train", event, name)) == SIGNALS[name]
        assert sorted(path.name for path in folder.iterdir()) == names
    with pytest.raises(SafetensorError):
        load_file(folder / "two.safetensors")
    assert run(folder, Trigger("train", 99, name)) == 0
    assert run(folder, Trigger("plan", 0, name)) == 0


@pytest.fixture
def matrix(tmp_path: Path) -> Matrix:
    """With a reference, and without the library."""
    matrix = Matrix.__new__(Matrix)
    matrix.reference = tmp_path / "reference"
    whole = matrix.reference / "runs" / "quickstart"
    for name in ("spliced", "trained", "no_splice", "export"):
        (whole / name).mkdir(parents=True)
        save_file({"x": torch.arange(4.0)}, whole / name / "model.safetensors")
    for name in ("heads.json", "plan.json", "splice.json"):
        (whole / name).write_text("{}")
    (whole / "results.json").write_text('{"arms": {}, "seconds": 1}')
    return matrix


def test_other_bits_and_leftovers_are_seen(matrix: Matrix, tmp_path: Path) -> None:
    again = Path(shutil.copytree(matrix.reference / "runs" / "quickstart", tmp_path / "again"))
    (again / "results.json").write_text('{"arms": {}, "seconds": 2}')
    assert matrix._differs(again) == []
    save_file({"x": torch.arange(4.0) + 1e-6}, again / "trained" / "model.safetensors")
    (again / "plan.json").write_text("{ }")
    (again / ".export.surgery-12.tmp").mkdir()
    wrong = " ".join(matrix._differs(again))
    assert "trained/model.safetensors" in wrong and "plan.json" in wrong and ".export.surgery-12.tmp" in wrong


def test_half_written_files_are_seen(folder: Path) -> None:
    assert Matrix._half_written(folder, "SIGINT") == []
    (folder / ".trained.surgery-7.tmp").mkdir()
    (folder / ".trained.surgery-7.tmp" / "model.safetensors").write_bytes(b"x")
    assert Matrix._half_written(folder, "SIGKILL") == []
    assert "left behind" in Matrix._half_written(folder, "SIGINT")[0]
    (folder / "plan.json").write_text("{")
    assert "plan.json" in Matrix._half_written(folder, "SIGKILL")[0]


@pytest.mark.parametrize(
    ("way", "code", "err", "good"),
    [
        ("SIGKILL", -9, "", True),
        ("SIGTERM", 0, "", False),
        ("SIGINT", 130, "", True),
        ("SIGINT", 130, "Traceback (most recent call last):\nKeyboardInterrupt", False),
        ("full disk", 2, "error: steps: full. Make room.", True),
        ("full disk", 2, "", False),
        ("full disk", 1, "internal error: OSError", False),
    ],
)
def test_exit_codes_and_lines(way: str, code: int, err: str, good: bool) -> None:
    assert (Matrix._ended(Ended(code, err), way) == []) == good
