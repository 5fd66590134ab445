"""Lines about progress: not too many, and with an estimate of the time left."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from surgery.report import progress_lines
from surgery.report.progress_lines import ProgressLines, time_left


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress_lines, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def run(clock: Clock, total: int, seconds: float, first: int = 1, every_step: bool = False) -> list[str]:
    """The lines of a stage whose steps take so many seconds each."""
    lines: list[str] = []
    reporter = ProgressLines(lines.append, every_step)
    reporter.start("train", "training")
    for step in range(first, total + 1):
        clock.now += seconds
        reporter.progress(step, total, f"loss {step}")
    return lines[1:]


def test_a_long_stage_has_ten_lines_with_the_time_left(clock: Clock) -> None:
    lines = run(clock, 200, 3.0)
    assert [line.split()[0] for line in lines] == [str(n) for n in range(20, 201, 20)]
    assert lines[0] == " " * 11 + "20 of 200  loss 20, 9 min left"
    assert lines[8].endswith("180 of 200  loss 180, 1 min left") and lines[9].endswith("200 of 200  loss 200")


def test_a_short_stage_has_lines_only_if_it_is_slow(clock: Clock) -> None:
    assert run(clock, 6, 1.0) == []
    assert [line.split()[0] for line in run(clock, 6, 4.0)] == ["3", "6"]
    assert [line.split()[0] for line in run(clock, 6, 10.0)] == ["1", "2", "3", "4", "5", "6"]


def test_every_step(clock: Clock) -> None:
    lines = run(clock, 6, 1.0, every_step=True)
    assert len(lines) == 6 and lines[0].endswith("1 of 6  loss 1, 5 s left")


def test_steps_before_an_interruption_took_no_time_now(clock: Clock) -> None:
    lines = run(clock, 100, 2.0, first=51)
    assert lines[0].endswith("51 of 100  loss 51") and lines[1].endswith("60 of 100  loss 60, 1 min left")
    assert lines[4].endswith("90 of 100  loss 90, 20 s left")


def test_a_new_stage_starts_at_nothing(clock: Clock) -> None:
    lines: list[str] = []
    reporter = ProgressLines(lines.append)
    for stage in ("train", "control"):
        reporter.start(stage, "training")
        for step in range(1, 101):
            clock.now += 1
            reporter.progress(step, 100)
        reporter.finish(stage, 100)
    reporter.skip("export", "finished")
    reporter.note("data", "3 rows")
    first, second = lines[:12], lines[12:24]
    assert first[1:11] == second[1:11] and first[1].endswith("10 of 100  2 min left")
    assert (first[0], first[11]) == ("    train  training ...", "    train  done in 100.0 s")
    assert lines[24:] == ["   export  skipped: finished", "     data  3 rows"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (60, "1 min"), (3540, "59 min"), (3600, "1 h 0 min"), (9000, "2 h 30 min")],
)
def test_time_left(seconds: float, text: str) -> None:
    assert time_left(seconds) == f"{text} left"
