"""Count the events of a run inside its process, and act at one of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")
FILLER = "filler"  # what leaves no room on the disk


@dataclass(frozen=True)
class Trigger:
    """What happens at an event of a stage: a signal's name, `full disk`, or `pause`."""

    stage: str
    event: int
    action: str


class Events:
    """Watches this process. Reference runs write down every event, and a copy of the folder at each stage's start.

    Args:
        folder: of the run; only what is written below it counts.
        trigger: None for a reference run.
        record: where a reference run's `events.json` and `before/STAGE` go.
    """

    def __init__(self, folder: Path, trigger: Trigger | None, record: Path | None) -> None:
        self.folder, self.trigger, self.record = folder, trigger, record
        self.stage, self.count, self.busy = "", 0, False
        self.seen: dict[str, list[str]] = {}
        self._below = os.path.realpath(folder) + "/"

    def watch(self) -> None:
        """From now on; cannot be undone."""
        import safetensors.torch as tensors

        from surgery.commands.progress import Bars

        start, tick = Bars.start, Bars.progress

        def started(bars: Bars, stage: str, what: str) -> None:
            self._begin(stage)
            start(bars, stage, what)

        def ticked(bars: Bars, done: int, total: int, note: str = "") -> None:
            self.event(f"tick {done} of {total}")
            tick(bars, done, total, note)

        Bars.start, Bars.progress = started, ticked  # type: ignore[method-assign]
        tensors.serialize_file = self._written(tensors.serialize_file)  # type: ignore[attr-defined]
        sys.addaudithook(self._audit)

    def _begin(self, stage: str) -> None:
        self.stage, self.count = stage, 0
        self.seen[stage] = []
        if self.record is not None:
            self.busy = True
            if self.folder.exists():
                shutil.copytree(self.folder, self.record / "before" / stage)
            self.busy = False

    def save(self) -> None:
        """Writes `events.json` of a reference run."""
        if self.record is not None:
            self.busy = True
            (self.record / "events.json").write_text(json.dumps(self.seen, indent=1))

    def event(self, what: str, first: Callable[[], None] | None = None) -> None:
        """One more event of the stage; `first` is done before the action."""
        if not self.stage or self.busy:
            return
        self.seen[self.stage].append(what)
        here, self.count = self.count, self.count + 1
        if self.trigger is None or (self.trigger.stage, self.trigger.event) != (self.stage, here):
            return
        self.busy = True
        if first is not None and self.trigger.action.startswith("SIG"):
            first()
        if self.trigger.action == "full disk":
            fill(self.folder.parents[1] / FILLER)
        else:
            name = "SIGSTOP" if self.trigger.action == "pause" else self.trigger.action
            os.kill(os.getpid(), signal.Signals[name])
        self.busy = False

    def _audit(self, event: str, given: tuple[Any, ...]) -> None:
        if event == "open":
            if isinstance(given[2], int) and given[2] & _WRITES and self._mine(given[0]):
                self.event(f"open {self._short(given[0])}")
        elif event in _CHANGES and self._mine(given[0]):
            self.event(f"{event} {self._short(given[0])}")

    def _mine(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and os.path.abspath(os.fspath(path)).startswith(self._below)

    def _short(self, path: Any) -> str:
        return os.path.relpath(os.path.abspath(os.fspath(path)), self._below)

    def _written(self, real: Callable[..., None]) -> Callable[..., None]:
        """`serialize_file`, with an event where half of the file is there."""

        def serialize_file(tensors: Any, path: Any, *given: Any, **named: Any) -> None:
            def half() -> None:
                real(tensors, path, *given, **named)
                os.truncate(path, os.path.getsize(path) // 2)

            if self._mine(path):
                self.event(f"half of {self._short(path)}", half)
            real(tensors, path, *given, **named)

        return serialize_file


def fill(path: Path) -> None:
    """Takes all room that is left on a small disk."""
    with open(path, "wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(b"x" * size) == size:
                    pass
            except OSError:
                continue


def moments(count: int) -> tuple[int, ...]:
    """The first of a stage's events, the last, and three between them."""
    return tuple(sorted({round(part * (count - 1)) for part in (0, 0.25, 0.5, 0.75, 1)}))


__all__ = ["FILLER", "Events", "Trigger", "moments"]
