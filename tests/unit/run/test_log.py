"""The log of a run: every event with its time, after those of earlier calls, and the error that ended it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from surgery import __version__
from surgery.errors import RunError
from surgery.run.log import logged


def work(folder: Path, error: BaseException | None = None) -> list[Any]:
    """What the reporter of the command gets."""
    reporter = Mock()
    run: Any = SimpleNamespace(folder=folder, reporter=reporter, stages=("locate", "plan"))
    with logged(run):
        run.reporter.skip("locate", "already finished")
        run.reporter.start("plan", "choosing\nheads")
        run.reporter.note("data", "caf\udce9")
        for step in range(1, 101):
            run.reporter.progress(step, 100, "x")
        if error is not None:
            raise error
        run.reporter.finish("plan", 1.25)
    return reporter.method_calls


def lines(folder: Path) -> list[str]:
    """Without the times, which all lines have."""
    written = (folder / "run.log").read_text(encoding="utf-8").splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00  ", line) for line in written)
    return [line.split("  ", 1)[1] for line in written]


def test_events_are_passed_on_and_appended(tmp_path: Path) -> None:
    events = work(tmp_path)
    assert events[:2] == [call.skip("locate", "already finished"), call.start("plan", "choosing\nheads")]
    assert events[2] == call.note("data", "caf\udce9") and events[-1] == call.finish("plan", 1.25)
    assert [event[0] for event in events[3:-1]] == ["progress"] * 100
    first = lines(tmp_path)
    assert first[:4] == [
        f"surgery {__version__}: locate, plan",
        "   locate  skipped: already finished",
        "     plan  choosing heads ...",
        "     data  caf\\udce9",
    ]
    assert len(first) == 4 + 10 + 1 and first[4].lstrip().startswith("10 of 100  x, ")
    assert first[-1] == "     plan  done in 1.2 s"
    # After `cp -al` another folder shares the log: it is copied before anything is appended.
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "run.log").hardlink_to(tmp_path / "run.log")
    work(tmp_path)
    assert lines(tmp_path)[: len(first)] == first and len(lines(tmp_path)) == 2 * len(first)
    assert lines(tmp_path / "copy") == first


def test_the_error_that_ends_a_run_is_the_last_line_without_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123")
    token = "hf_" + "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bD1fG4h"
    address = f"https://user:{token}@host/x?key=0123456789abcdef0123"
    for error, text in (
        (RunError("plan", "x", "Do y."), "plan: x. Do y"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (RunError("plan", address, "Do y."), "plan: https://user:<token>@host/x?key=<token>. Do y"),
    ):
        with pytest.raises(type(error)):
            work(tmp_path, error)
        assert lines(tmp_path)[-1] == f"stopped: {text}"
