"""Lines and bars that show how far a command is."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator

import pytest
from rich.table import Table
from rich.text import Text

from surgery.commands import progress
from surgery.commands.progress import Bars, PlainStream, plain, show_progress
from surgery.errors import SurgeryError


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What a terminal of 140 columns receives. Its clock is set by `steps`."""
    file = io.StringIO()
    screen = progress._Output(file=file, force_terminal=True, width=140, get_time=lambda: NOW[0])
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


def test_a_bar_shows_the_time_left_quiet_nothing_and_verbose_every_step(terminal: io.StringIO) -> None:
    steps(Bars())
    shown = Text.from_ansi(terminal.getvalue()).plain
    assert "3/40 0:00:30 0:06:10 left  a note" in shown and "3 of 40" not in shown
    assert "memory  1 GiB" in shown and "done in 1.0 s" in shown
    for amount, expected in (("quiet", 0), ("verbose", 6)):
        terminal.truncate(terminal.seek(0))
        show_progress(amount)
        steps(Bars())
        lines = terminal.getvalue().splitlines()
        assert len(lines) == expected and "\x1b" not in terminal.getvalue()
    assert lines[0] == "   locate  measuring ..." and lines[1].startswith(" " * 11 + "1 of 40  a note, ")


ESCAPES = "a\x1b[2J\x1b]0;t\x07\x9b31m\x7f\r\u202eb"


def test_control_characters_reach_no_terminal_by_any_way(terminal: io.StringIO) -> None:
    """Lines, cells, titles and bars keep their own colours; `print` and libraries write to a `PlainStream`."""
    assert plain(f"\tè {ESCAPES}\n") == "\tè a\\x1b[2J\\x1b]0;t\\x07\\x9b31m\\x7f\\r\\u202eb\n"
    table = Table(ESCAPES, title=ESCAPES)
    table.add_row(Text(ESCAPES))
    bars = Bars()
    bars.start(ESCAPES, ESCAPES)
    bars.progress(1, 2, ESCAPES)
    bars.finish(ESCAPES, 1.0)
    for line in (table, ESCAPES):
        progress.out.print(line)
    bars.note(ESCAPES, ESCAPES)
    assert terminal.getvalue().count("\\x1b[2J") > 4
    assert not re.search("\x1b\\[2J|\x1b]|[\x07\x7f\x9b\u202e]", terminal.getvalue())


def piped(write: Callable[[PlainStream], None], path: str | None = None) -> tuple[bytes, int]:
    """What a pipe receives, or a device, and the exit code of the last flush."""
    ours, theirs = os.pipe() if path is None else (os.open(os.devnull, os.O_RDONLY), os.open(path, os.O_WRONLY))
    stream = PlainStream(open(theirs, "w", encoding="ascii"))  # noqa: SIM115
    write(stream)
    code = stream.last_flush()
    stream.close()
    with open(ours, "rb") as file:
        return file.read(), code


def test_streams_write_names_that_are_not_utf8_and_no_escapes() -> None:
    def both(stream: PlainStream) -> None:
        print(f"{ESCAPES[:5]} \udcff", file=stream)
        stream.styled.write("\x1b[1m\n")

    assert piped(both) == (b"a\\x1b[2J \\udcff\n\x1b[1m\n", 0)


def test_an_output_without_a_reader_or_space_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """As SIGPIPE would, or with one line."""
    ours, theirs = os.pipe()
    os.close(ours)
    stream = PlainStream(open(theirs, "w", encoding="utf-8"))  # noqa: SIM115
    for writer in (stream, stream.styled):
        with pytest.raises(SystemExit) as ended:
            writer.write("x" * 100_000)
            writer.flush()
        assert ended.value.code == 141
    stream.write("buffered")
    assert stream.last_flush() == 141 and stream.last_flush() == 0, "nothing is left for the end of the process"
    assert piped(lambda stream: print("x", file=stream), "/dev/full")[1] == 2
    assert capsys.readouterr().err == "error: output: No space left on device. Free some space, or write elsewhere.\n"
    with pytest.raises(SurgeryError, match=r"^output: No space left"):
        PlainStream(open("/dev/full", "w")).write("x" * 100_000)  # noqa: SIM115
