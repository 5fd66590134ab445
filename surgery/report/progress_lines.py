"""Report progress as plain lines of text: for a log file, and for an output that is not a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable

from surgery.report.text import duration_text

MANY_STEPS = 50  # a stage with so many steps gets a line at each tenth
PAUSE = 10.0  # seconds after which a tenth of a shorter stage gets a line


class ProgressLines:
    """A reporter that writes one line for each event. Others are subclasses, such as progress bars.

    Args:
        write: takes one line. By default lines are discarded.
        every_step: write a line for every step. By default, at most ten of a stage.
    """

    def __init__(self, write: Callable[[str], None] = lambda line: None, every_step: bool = False) -> None:
        self._write, self._every_step = write, every_step
        self._began = self._last = self._seen = (0, time.monotonic())  # finished steps, and the time in seconds
        self._is_first = True

    def start(self, stage: str, what: str) -> None:
        """Write that a stage starts."""
        self._began = self._last = self._seen = (0, time.monotonic())
        self._is_first = True
        self._write(f"{stage:>9}  {what} ...")

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Write that `done` of `total` steps are finished, with a short note and an estimate of the time left.

        A smaller number than before begins a new count.
        """
        now = time.monotonic()
        if done < self._seen[0]:
            self._began = self._last = (0, self._seen[1])
        if self._is_first and done > 1:  # it goes on after an interruption, whose steps took no time here
            self._began = (done, now)
        self._is_first, self._seen = False, (done, now)
        is_tenth = done * 10 // total > self._last[0] * 10 // total
        if not (self._every_step or (is_tenth and (total >= MANY_STEPS or now - self._last[1] >= PAUSE))):
            return
        self._last = (done, now)
        first, began = self._began
        left = ""
        if total > done > first:
            left = f"{duration_text((now - began) / (done - first) * (total - done))} left"
        self._write(f"{'':>9}  {done} of {total}  {', '.join(filter(None, (note, left)))}".rstrip())

    def finish(self, stage: str, seconds: float) -> None:
        """Write that a stage is finished, and its time."""
        self._write(f"{stage:>9}  done in {seconds:.1f} s")

    def skip(self, stage: str, why: str) -> None:
        """Write that a stage is skipped, and why."""
        self._write(f"{stage:>9}  skipped: {why}")

    def note(self, topic: str, text: str) -> None:
        """Write one line about a part of the run."""
        self._write(f"{topic:>9}  {text}")
