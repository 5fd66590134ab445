"""Print progress bars and lines, and silence the output of libraries."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from surgery.report.progress_lines import ProgressLines

# A pipe has no width: names must not be truncated. A name in brackets is no markup.
out = Console(width=None if sys.stdout.isatty() else 140, markup=False, emoji=False)


def silence_libraries() -> None:
    """Turn off the progress bars and warnings of libraries. Call it before they are imported."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("RUST_BACKTRACE", "0")
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)


_shown: Literal["quiet", "normal", "verbose"] = "normal"


def show_progress(amount: Literal["quiet", "normal", "verbose"]) -> None:
    """Set what later `Bars` print: nothing, a bar or at most ten lines a stage, or a line for every step."""
    global _shown
    _shown = amount


class Bars:
    """Progress bar of a stage. Prints plain lines if the output is not a terminal."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._has_bar = _shown == "normal" and out.is_terminal
        self._lines = ProgressLines(_ignore if _shown == "quiet" else _print_line, every_step=_shown == "verbose")

    def start(self, stage: str, what: str) -> None:
        """Show that a stage starts."""
        if not self._has_bar:
            self._lines.start(stage, what)
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        left = (TimeRemainingColumn(), TextColumn("left  {task.fields[note]}"))
        self._bar = Progress(*columns, *left, console=out, transient=True, speed_estimate_period=600)
        self._task = self._bar.add_task(f"{stage:>9}  {what}", total=None, note="")
        self._bar.start()

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Show that `done` of `total` steps are finished, with a short note and the time left."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total, note=note)
        elif not self._has_bar:
            self._lines.progress(done, total, note)

    def stop(self) -> None:
        """Remove the bar. Call it after an error too."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None

    def finish(self, stage: str, seconds: float) -> None:
        """Show that a stage is finished, and its time."""
        self.stop()
        self._lines.finish(stage, seconds)

    def skip(self, stage: str, why: str) -> None:
        """Show that a stage is skipped, and why."""
        self._lines.skip(stage, why)

    def note(self, topic: str, text: str) -> None:
        """Show one line about a part of the run."""
        self._lines.note(topic, text)


def say(topic: str, text: str) -> None:
    """Print one line on standard error, unless nothing but results is to be printed."""
    if _shown != "quiet":
        sys.stderr.write(f"{topic:>9}  {text}\n")


def _print_line(line: str) -> None:
    out.print(line, highlight=False, markup=False)


def _ignore(line: str) -> None:
    pass
