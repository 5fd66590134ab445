"""The log of a run: every event with its time, after those of earlier calls, and the error that ended it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from surgery import __version__
from surgery.errors import RunError
from surgery.run.log import logged


class Spy:
    """A reporter that keeps the names of the events."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *values: self.events.append((name, *values))


def call(folder: Path, error: BaseException | None = None) -> list[tuple[Any, ...]]:
    spy = Spy()
    run: Any = SimpleNamespace(folder=folder, reporter=spy, stages=("locate", "plan"))
    with logged(run):
        run.reporter.skip("locate", "already finished")
        run.reporter.start("plan", "choosing\nheads")
        run.reporter.note("data", "caf\udce9")
        for step in range(1, 101):
            run.reporter.progress(step, 100, "x")
        if error is not None:
            raise error
        run.reporter.finish("plan", 1.25)
    return spy.events


def lines(folder: Path) -> list[str]:
    """Without the times, which all lines have."""
    written = (folder / "run.log").read_text(encoding="utf-8").splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00  ", line) for line in written)
    return [line.split("  ", 1)[1] for line in written]


def test_events_are_passed_on_and_appended(tmp_path: Path) -> None:
    events = call(tmp_path)
    assert [event[0] for event in events] == ["skip", "start", "note", *["progress"] * 100, "finish"]
    assert events[1] == ("start", "plan", "choosing\nheads") and events[-1] == ("finish", "plan", 1.25)
    first = lines(tmp_path)
    assert first[:4] == [
        f"surgery {__version__}: locate, plan",
        "   locate  skipped: already finished",
        "     plan  choosing heads ...",
        "     data  caf\\udce9",
    ]
    assert len(first) == 4 + 10 + 1 and first[4].lstrip().startswith("10 of 100  x, ")
    assert first[-1] == "     plan  done in 1.2 s"
    call(tmp_path)
    assert lines(tmp_path)[: len(first)] == first and len(lines(tmp_path)) == 2 * len(first)


def test_the_error_that_ends_a_run_is_the_last_line(tmp_path: Path) -> None:
    for error, text in ((RunError("plan", "x", "Do y."), "plan: x. Do y"), (KeyboardInterrupt(), "KeyboardInterrupt")):
        with pytest.raises(type(error)):
            call(tmp_path, error)
        assert lines(tmp_path)[-1] == f"stopped: {text}"


def test_no_token_reaches_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123")
    token = "hf_" + "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bD1fG4h"
    with pytest.raises(RunError):
        call(tmp_path, RunError("base.model", f"https://user:{token}@host/x?key=0123456789abcdef0123", "Set a folder."))
    text = (tmp_path / "run.log").read_text()
    assert "base.model" in text and text.count("<token>") == 2
    assert token not in text and "0123456789abcdef0123" not in text


def test_a_log_that_another_folder_shares_is_copied_first(tmp_path: Path) -> None:
    """As after `cp -al`."""
    call(tmp_path)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "run.log").hardlink_to(tmp_path / "run.log")
    call(tmp_path)
    assert len(lines(tmp_path)) == 2 * len(lines(tmp_path / "copy"))
