"""Run the parts of the bench: item by item, within a time limit, and in a child process on a GPU.

An error in a GPU kernel leaves the process without a usable GPU, and a compiler can hang. The items of a part therefore
run in a child, which writes results to a log. A child that dies or hangs costs one item; the next child runs the rest.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.gpu.env import Row, first_line

Event = dict[str, Any]
CRASHED = 3  # a child's exit code when its GPU is lost
ENTRY = Path(__file__).parent  # run by its path: `python bench/gpu`


@dataclass(frozen=True)
class Options:
    """Options of a run.

    Attributes:
        device: `cuda` or `cpu`.
        toy: use sizes that a CPU finishes in seconds. Their timings mean nothing.
        repeats: of each timing, after warm-up.
    """

    device: str = "cuda"
    toy: bool = False
    repeats: int = 7


class Part(Protocol):
    """Interface of a module of measurements."""

    def items(self, options: Options) -> list[str]:
        """Names of the items that can be measured separately."""

    def run(self, item: str, options: Options) -> list[Row]:
        """Measure one item. Each row has `table`; a row of words has `line` instead of numbers."""


def work(part: Part, items: Sequence[str], options: Options, seconds: float, emit: Callable[[Event], None]) -> bool:
    """Measure items one after the other in this process. Returns False if the GPU is lost."""
    deadline = time.monotonic() + seconds
    for item in items:
        start = time.monotonic()
        if start > deadline:
            emit({"end": item, "rows": [note(item, "skipped: no time left")], "seconds": 0.0})
            continue
        emit({"begin": item})
        lost = False
        try:
            rows = part.run(item, options)
        except Exception as error:  # every kernel has its own way to fail; the others are still measured
            rows, lost = [failure(item, error)], gpu_lost(options.device)
        emit({"end": item, "rows": rows, "seconds": time.monotonic() - start})
        if lost:
            return False
    return True


def gpu_lost(device: str) -> bool:
    """True if an earlier error left the process without a usable GPU. Then every later call fails too."""
    import torch

    if device != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def note(item: str, text: str, failed: bool = False) -> Row:
    """Make a row of words."""
    return {"line": f"{item}: {text}", "failed": failed}


def failure(item: str, error: Exception) -> Row:
    """Make a row from an exception. Running out of memory is a result, not a failure."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return note(item, f"out of memory ({first_line(error)})")
    return note(item, f"failed: {type(error).__name__}: {first_line(error)}", failed=True)


def here(name: str, part: Part, items: Sequence[str], options: Options, seconds: float) -> list[Row]:
    """Run these items of a part in this process."""
    log = Log(name)
    work(part, items, options, seconds, log.add)
    return log.rows()


class Log:
    """The events of one part, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.events: list[Event] = []

    def add(self, event: Event) -> None:
        self.events.append(event)
        if "end" in event:
            print(f"{self.name} {event['end']}: {event['seconds']:.1f} s", file=sys.stderr, flush=True)

    def rows(self) -> list[Row]:
        return [{"part": self.name, **row} for event in self.events if "end" in event for row in event["rows"]]

    @property
    def ended(self) -> set[str]:
        return {event["end"] for event in self.events if "end" in event}

    @property
    def unfinished(self) -> str | None:
        """The item that has begun and has not ended."""
        begun = [event["begin"] for event in self.events if "begin" in event]
        return begun[-1] if begun and begun[-1] not in self.ended else None


def supervised(name: str, items: Sequence[str], options: Options, seconds: float, folder: Path) -> list[Row]:
    """Run all items of a part in child processes, within `seconds`. `folder` holds the children's logs."""
    deadline, log, todo = time.monotonic() + seconds, Log(name), list(items)
    for attempt in range(len(items) + 1):
        left = deadline - time.monotonic()
        if not todo or left < 1:
            break
        path = folder / f"{name}-{attempt}.jsonl"
        words = json.dumps({"options": asdict(options), "items": todo, "seconds": left - 0.05 * seconds})
        command = [sys.executable, str(ENTRY), "--child", name, "--log", str(path), "--work", words]
        before = len(log.ended)
        ending = _watch(command, path, log, deadline, item_seconds=max(60.0, seconds / 2))
        stopped = log.unfinished
        if stopped is not None:
            log.add({"end": stopped, "rows": [note(stopped, ending, failed=True)], "seconds": 0.0})
        elif len(log.ended) == before:
            log.add({"end": todo[0], "rows": [note(todo[0], f"never began: {ending}", failed=True)], "seconds": 0.0})
        todo = [item for item in items if item not in log.ended]
    for item in todo:
        log.add({"end": item, "rows": [note(item, "skipped: no time left")], "seconds": 0.0})
    return log.rows()


def _watch(command: Sequence[str], path: Path, log: Log, deadline: float, item_seconds: float) -> str:
    """Run one child process, read its log as it grows, and return a description of its end."""
    path.write_text("")
    process = subprocess.Popen(command, start_new_session=True)
    progress, rest = time.monotonic(), ""
    try:
        with path.open() as written:
            while True:
                code = process.poll()
                if new := written.read():
                    *lines, rest = (rest + new).split("\n")
                    progress = time.monotonic()
                    for line in lines:
                        log.add(json.loads(line))
                if code is not None:
                    return f"its process ended with code {code}"
                if time.monotonic() > min(deadline, progress + item_seconds):
                    return "stopped: out of time"
                time.sleep(0.1)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the session that this child began
            process.wait()


def child(part: Part, work_words: str, path: Path) -> int:
    """Run in the child process of `_watch`: measure, and write one line for each event."""
    asked = json.loads(work_words)
    with path.open("a") as log:

        def emit(event: Event) -> None:
            log.write(json.dumps(plain(event)) + "\n")
            log.flush()

        alive = work(part, asked["items"], Options(**asked["options"]), asked["seconds"], emit)
    return 0 if alive else CRASHED


def plain(value: Any) -> Any:
    """Convert a value for strict JSON: numbers that are not finite become text."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
