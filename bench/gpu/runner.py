"""Run items of the bench: one after the other or side by side, within a time limit, in child processes on a GPU.

An error in a GPU kernel leaves the process without a usable GPU, and a compiler can hang. Items therefore run in a
child, which writes results to a log. A child that dies or hangs costs one item; the next child runs the rest.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.gpu.env import Row, first_line

Event = dict[str, Any]
Keep = Callable[[str, str, list[Row], float], None]  # part, item, its rows, seconds
CRASHED = 3  # a child's exit code when its GPU is lost
ENTRY = Path(__file__).parent  # run by its path: `python bench/gpu`
ROOT = Path(__file__).resolve().parents[2]
LONGEST_ITEM = 360.0  # seconds; less than a command has, so that an item that hangs becomes a failure


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

    def warm(self, options: Options) -> list[str]:
        """The items that together compile and tune every kernel of the part."""

    def run(self, item: str, options: Options) -> list[Row]:
        """Measure one item. Each row has `table`; a row of words has `line` instead of numbers."""


def work(part: Part, items: Sequence[str], options: Options, seconds: float, emit: Callable[[Event], None]) -> bool:
    """Measure items one after the other in this process, while there is time. Returns False if the GPU is lost."""
    deadline = time.monotonic() + seconds
    for item in items:
        start = time.monotonic()
        if start > deadline:
            break
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
    return note(item, f"failed: {type(error).__name__}: {first_line(error)} [{places(error)}]", failed=True)


def places(error: BaseException) -> str:
    """File and line of an exception: the last frame in this repository, and the deepest frame if it is another."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(ROOT) and ".venv" not in frame.filename]
    return ", ".join(dict.fromkeys(f"{_short(f.filename)}:{f.lineno}" for f in (*ours[-1:], *frames[-1:])))


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else "/".join(path.parts[-3:])


def here(name: str, part: Part, items: Sequence[str], options: Options, seconds: float, keep: Keep) -> None:
    """Run these items of a part in this process."""

    def emit(event: Event) -> None:
        if "end" in event:
            keep(name, event["end"], event["rows"], event["seconds"])

    work(part, items, options, seconds, emit)


class Child:
    """A process that runs items of a part and writes its events to a log.

    Args:
        log: file to write; its folder exists.
        variables: more variables of the environment.
    """

    def __init__(
        self,
        name: str,
        items: Sequence[str],
        options: Options,
        seconds: float,
        log: Path,
        variables: Mapping[str, str],
    ) -> None:
        self.name, self.left, self.since = name, list(items), time.monotonic()
        self.begun: str | None = None
        self.progress = False  # an item has ended
        words = json.dumps({"options": asdict(options), "items": list(items), "seconds": seconds})
        command = [sys.executable, str(ENTRY), "--child", name, "--log", str(log), "--work", words]
        log.write_text("")
        self._written, self._rest = log.open(), ""
        self.process = subprocess.Popen(command, start_new_session=True, env={**os.environ, **variables})

    def ended(self, keep: Keep, deadline: float) -> bool:
        """Keep new results. True after the child has ended, or was stopped at a time limit.

        An item that crashes, or takes longer than `LONGEST_ITEM`, is kept as failed. One that is stopped at the
        deadline is not kept: it is the first of the next run.
        """
        code = self.process.poll()
        *lines, self._rest = (self._rest + self._written.read()).split("\n")
        for event in map(json.loads, lines):
            self.begun, self.since = event.get("begin"), time.monotonic()
            if "end" in event:
                self.left.remove(event["end"])
                self.progress = True
                keep(self.name, event["end"], event["rows"], event["seconds"])
        over = time.monotonic() > self.since + LONGEST_ITEM
        if code is None and not over and time.monotonic() < deadline:
            return False
        self.stop()
        ending = f"stopped after {LONGEST_ITEM:.0f} s" if code is None else f"its process ended with code {code}"
        guilty = self.begun or (None if self.progress else next(iter(self.left), None))
        if guilty and (over or code):
            self.left.remove(guilty)
            text = ending if self.begun else f"never began: {ending}"
            keep(self.name, guilty, [note(guilty, text, failed=True)], time.monotonic() - self.since)
        return True

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # the session that this child began
            self.process.wait()
        self._written.close()


def supervised(
    work_of: Sequence[tuple[str, Sequence[str]]],
    options: Options,
    seconds: float,
    logs: Path,
    keep: Keep,
    at_once: int = 1,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run items in child processes within `seconds`, `at_once` children at a time. What is left has no result.

    Args:
        work_of: for each child, its part and its items.
        logs: folder for the children's logs.
    """
    deadline = time.monotonic() + seconds
    todo, count = list(work_of), 0
    children: list[Child] = []
    try:
        while todo or children:
            left = deadline - time.monotonic()
            while todo and len(children) < at_once and left > 1:
                name, items = todo.pop(0)
                count += 1
                log = logs / f"{name}-{count}.jsonl"
                children.append(Child(name, items, options, left - 0.05 * seconds, log, variables or {}))
            for child in list(children):
                if child.ended(keep, deadline):
                    children.remove(child)
                    if child.left and child.process.returncode and time.monotonic() < deadline:
                        todo.insert(0, (child.name, child.left))
            if not children and left <= 1:
                return
            time.sleep(0.1)
    finally:
        for child in children:
            child.stop()


def child(part: Part, work_words: str, path: Path) -> int:
    """Run in the process of `Child`: measure, and write one line for each event."""
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
