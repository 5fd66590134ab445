"""Any text in one line: nothing that moves the cursor, and no longer than it may be. Lines about progress."""

from __future__ import annotations

import unicodedata
from types import SimpleNamespace

import pytest

from surgery.report import progress_lines
from surgery.report.progress_lines import ProgressLines
from surgery.report.text import cut_middle, visible


def test_what_does_not_print_is_an_escape() -> None:
    for text, shown in (
        ("plain text", "plain text"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\\n", "\\\\n"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("\u202eevil\u2066", "\\u202eevil\\u2066"),
        ("\u2028\u00a0\u200b", "\\u2028\\xa0\\u200b"),
        ("é 漢 🙂", "é 漢 🙂"),
    ):
        assert visible(text, 60) == shown
    every = visible("".join(map(chr, range(0x3000))), 100_000)
    assert all(char == " " or unicodedata.category(char)[0] not in "CZ" for char in every)


def test_a_long_text_is_cut_in_the_middle() -> None:
    for text in ("x" * 1000, "\n" * 1000, "ab\x1b" * 400, "漢" * 62, "y" * 61 + "\n"):
        for limit in (7, 8, 20, 61):
            shown = visible(text, limit)
            assert len(shown) <= limit and shown.count(" ... ") == 1, (text, limit)
            head, tail = shown.split(" ... ")
            assert visible(text, 10**6).startswith(head) and visible(text, 10**6).endswith(tail), (text, limit)
    assert visible("x" * 20, 20) == cut_middle("x" * 20, 20) == "x" * 20 and visible("\n" * 10, 20) == "\\n" * 10
    text = "start " + "x" * 100 + " end"
    assert cut_middle(text, 21) == visible(text, 21) == "start xx ... xxxx end"


class Stage:
    """A stage whose time passes only when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress_lines, "time", SimpleNamespace(monotonic=lambda: self.now))

    def lines(self, total: int, seconds: float, first: int = 1, every_step: bool = False) -> list[str]:
        """Lines of the stage, whose steps take so many seconds each."""
        lines: list[str] = []
        reporter = ProgressLines(lines.append, every_step)
        reporter.start("train", "training")
        for step in range(first, total + 1):
            self.now += seconds
            reporter.progress(step, total, f"loss {step}")
        return lines[1:]


def test_a_long_stage_has_ten_lines_and_a_short_one_only_if_it_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    lines = stage.lines(200, 3.0)
    assert [line.split()[0] for line in lines] == [str(n) for n in range(20, 201, 20)]
    assert lines[0] == " " * 11 + "20 of 200  loss 20, 9 min left"
    assert lines[8].endswith("180 of 200  loss 180, 60 s left") and lines[9].endswith("200 of 200  loss 200")
    assert stage.lines(6, 1.0) == []
    assert [line.split()[0] for line in stage.lines(6, 4.0)] == ["3", "6"]
    assert [line.split()[0] for line in stage.lines(6, 10.0)] == ["1", "2", "3", "4", "5", "6"]
    lines = stage.lines(6, 1.0, every_step=True)
    assert len(lines) == 6 and lines[0].endswith("1 of 6  loss 1, 5 s left")


def test_a_new_count_has_its_own_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, lines = Stage(monkeypatch), []
    reporter = ProgressLines(lines.append)
    for total, seconds in ((100, 1.0), (100, 60.0)):
        for step in range(1, total + 1):
            stage.now += seconds
            reporter.progress(step, total)
    assert len(lines) == 20 and lines[10].endswith("10 of 100  1 h 30 min left")


def test_steps_before_an_interruption_took_no_time_now(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Stage(monkeypatch).lines(100, 4.0, first=51)
    assert lines[0].endswith("51 of 100  loss 51") and lines[1].endswith("60 of 100  loss 60, 3 min left")
    assert lines[4].endswith("90 of 100  loss 90, 40 s left")
