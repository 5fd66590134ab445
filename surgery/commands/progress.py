"""Print progress bars and lines without the control characters of names, and silence the output of libraries."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, Literal

from rich.console import Console, ConsoleOptions
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment

from surgery.errors import SurgeryError
from surgery.report.progress_lines import ProgressLines

# Control characters but the tab and the line end, and those that change the direction of text.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
NO_READER = 128 + signal.SIGPIPE  # exit code of a command whose output nobody reads, as a shell reports it


def plain(text: str) -> str:
    """Return a text with control characters as escapes such as `\\x1b`: a terminal would obey them."""
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


class PlainStream(io.TextIOWrapper):
    """Standard stream for `print`, for errors and for libraries. It writes no control characters.

    It ends the command if nobody reads it, as SIGPIPE would, and reports a full disk. The attribute `styled` is the
    same stream with control characters, for the colours and the cursor of `out`.
    """

    def __init__(self, stream: io.TextIOWrapper, is_styled: bool = False) -> None:
        # File names may be not UTF-8. Both streams have the same buffer, so none holds text back.
        super().__init__(stream.buffer, stream.encoding, "backslashreplace", None, stream.line_buffering, True)
        self._replaced, self._is_styled = stream, is_styled  # the replaced stream would close the buffer
        self.styled = self if is_styled else PlainStream(stream, True)

    def write(self, text: str) -> int:
        with _reported():
            super().write(text if self._is_styled else plain(text))
        return len(text)

    def flush(self) -> None:
        with _reported():
            super().flush()

    def last_flush(self) -> int:
        """Write what is buffered when the command ends. Returns an exit code."""
        try:
            self.flush()
            return 0
        except (SystemExit, SurgeryError) as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # Python flushes once more when it exits
            if isinstance(error, SystemExit):
                return NO_READER
            with suppress(SurgeryError):  # standard error is full too
                sys.stderr.write(f"error: {error}\n")
            return 2


@contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise SystemExit(NO_READER) from None
    except OSError as error:
        raise SurgeryError("output", error.strerror, "Free some space, or write elsewhere.") from None


class _Output(Console):
    """Console that escapes control characters in everything that it renders, such as cells and descriptions.

    A name in brackets is no markup.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    @property  # type: ignore[misc]
    def file(self) -> IO[str]:
        stream = super().file
        return getattr(stream, "styled", stream)

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)


out = _Output(width=None if sys.stdout.isatty() else 140)  # a pipe has no width: names must not be truncated


def silence_libraries() -> None:
    """Turn off the progress bars and warnings of libraries. Call it before they are imported."""
    settings = {
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TQDM_DISABLE": "1",
        "RUST_BACKTRACE": "0",
        "TRITON_CACHE_AUTOTUNING": "1",  # tuning takes minutes; the next process starts with its result
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)


_shown: Literal["quiet", "normal", "verbose"] = "normal"


def show_progress(amount: Literal["quiet", "normal", "verbose"]) -> None:
    """Set what later `Bars` print: nothing, a bar or at most ten lines a stage, or a line for every step."""
    global _shown
    _shown = amount


class Bars(ProgressLines):
    """Progress bar of a stage, to use in a `with` statement. Prints plain lines if the output is not a terminal."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._has_bar = _shown == "normal" and out.is_terminal
        super().__init__(out.print if _shown != "quiet" else lambda line: None, every_step=_shown == "verbose")

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = None

    def start(self, stage: str, what: str) -> None:
        if not self._has_bar:
            super().start(stage, what)
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        left = (TimeRemainingColumn(), TextColumn("left  {task.fields[note]}"))
        self._bar = Progress(*columns, *left, console=out, transient=True, speed_estimate_period=600)
        self._bar.add_task(f"{stage:>9}  {what}", total=None, note="")
        self._bar.start()

    def progress(self, done: int, total: int, note: str = "") -> None:
        if self._bar is not None:
            (task,) = self._bar.tasks
            if done < task.completed:
                self._bar.reset(task.id)
            self._bar.update(task.id, completed=done, total=total, note=note)
        elif not self._has_bar:
            super().progress(done, total, note)

    def finish(self, stage: str, seconds: float) -> None:
        self.__exit__()
        super().finish(stage, seconds)


def say(topic: str, text: str) -> None:
    """Print one line on standard error, unless nothing but results is to be printed."""
    if _shown != "quiet":
        sys.stderr.write(f"{topic:>9}  {text}\n")
