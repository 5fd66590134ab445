"""Lines and bars that show how far a command is."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console
from rich.text import Text

from surgery.console import progress
from surgery.console.progress import Bars, show_progress


def test_a_note_is_one_line_of_text(capsys: pytest.CaptureFixture[str]) -> None:
    Bars().note("data", "[x].jsonl: found: 3")
    assert capsys.readouterr().out == "     data  [x].jsonl: found: 3\n"


def test_the_output_is_not_a_terminal() -> None:
    assert not progress.out.is_terminal, "these tests read plain lines"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What a terminal of 140 columns receives. Its clock is set by `steps`."""
    file = io.StringIO()
    screen = Console(file=file, force_terminal=True, width=140, get_time=lambda: NOW[0])
    monkeypatch.setattr(progress, "out", screen)
    yield file
    show_progress("normal")


NOW = [0.0]


def steps(bars: Bars) -> None:
    """A stage of 40 steps, three of them finished, of ten seconds each."""
    bars.start("locate", "measuring")
    for step in (1, 2, 3):
        NOW[0] += 10
        bars.progress(step, 40, "a note")
    if bars._bar is not None:
        bars._bar.refresh()
    bars.note("memory", "1 GiB")
    bars.finish("locate", 1.0)


def test_a_bar_shows_the_time_left(terminal: io.StringIO) -> None:
    steps(Bars())
    shown = Text.from_ansi(terminal.getvalue()).plain
    assert "3/40 0:00:30 0:06:10 left  a note" in shown and "3 of 40" not in shown
    assert "memory  1 GiB" in shown and "done in 1.0 s" in shown


def test_quiet_shows_nothing_and_verbose_every_step(terminal: io.StringIO) -> None:
    show_progress("quiet")
    steps(Bars())
    assert terminal.getvalue() == ""
    show_progress("verbose")
    steps(Bars())
    shown = terminal.getvalue().splitlines()
    assert shown[0] == "   locate  measuring ..." and shown[1].startswith(" " * 11 + "1 of 40  a note, ")
    assert len(shown) == 6 and "\x1b" not in terminal.getvalue()
