"""`python -m bench.kills`: run the matrix of stages, moments and interruptions. Finished cells are not run again."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from bench.fuzz.__main__ import library
from bench.fuzz.corpus import RECIPES, TINY
from bench.fuzz.runner import broken
from bench.kills.events import FILLER, Events, Trigger, moments
from tests.support.forked import redirect, run_and_exit
from tests.support.processes import Reloads, stock

STAGES = ("locate", "plan", "splice", "train", "control", "evaluate", "export")
WAYS = ("SIGKILL", "SIGTERM", "SIGINT", "full disk", "two at once")
CODES = {"SIGKILL": (-9,), "SIGTERM": (-15, 143), "SIGINT": (-2, 130), "full disk": (2,), "two at once": (0,)}
WEIGHTS = ("spliced", "trained", "no_splice", "export")
DISK = 64  # MiB
LIMIT = 120.0
_LEFT = re.compile(r"\..+\.surgery-\d+\.tmp|step_\d+|steps|\..*lock")


@dataclass(frozen=True)
class Ended:
    """How a run ended: `code` is negative for a signal."""

    code: int
    err: str


class Matrix:
    """One reference run, and as many interrupted ones as there are cells.

    Args:
        root: results and the reference; `disk` below it is a small one where it could be mounted.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.disk = root, root / "disk"
        self.reference = root / "reference"
        os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(root / "mpl")}
        self.stock = stock()
        self.main = library()

    def run(
        self, cwd: Path, given: tuple[str, ...] = (), trigger: Trigger | None = None, record: Path | None = None
    ) -> int:
        """Starts the small run in a forked child, and returns its process id."""
        cwd.mkdir(parents=True, exist_ok=True)
        child = os.fork()
        if child == 0:
            self._become(cwd, ("run", str(RECIPES / "quickstart.yaml"), *TINY, *given), trigger, record)
        return child

    def _become(self, cwd: Path, arguments: tuple[str, ...], trigger: Trigger | None, record: Path | None) -> NoReturn:
        """Run the command, in the child."""

        def command() -> None:
            redirect("/dev/null", self.root / f"err.{os.getpid()}")
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            import surgery.export.reload

            surgery.export.reload.subprocess = Reloads(self.stock.address)  # type: ignore[assignment]
            os.chdir(cwd)
            sys.argv = ["surgery", *arguments]
            events = Events(cwd / "runs" / "quickstart", trigger, record)
            events.watch()
            try:
                self.main()
            finally:
                events.save()

        run_and_exit(command)

    def wait(self, child: int) -> Ended:
        """Waits for a run to end; kills one that hangs."""
        deadline = time.perf_counter() + LIMIT
        status = None
        while status is None:
            pid, found = os.waitpid(child, os.WNOHANG)
            if pid:
                status = found
            elif time.perf_counter() > deadline:
                os.kill(child, signal.SIGKILL)
            else:
                time.sleep(0.01)
        log = self.root / f"err.{child}"
        text = log.read_text("utf-8", "replace") if log.is_file() else ""
        log.unlink(missing_ok=True)
        return Ended(os.waitstatus_to_exitcode(status), text)

    def make_reference(self) -> dict[str, list[str]]:
        """An uninterrupted run, its events, and its folder at the beginning of every stage."""
        if not (self.reference / "events.json").is_file():
            shutil.rmtree(self.reference, ignore_errors=True)
            self.reference.mkdir(parents=True)
            ended = self.wait(self.run(self.reference, record=self.reference))
            if ended.code != 0:
                raise SystemExit(f"the run without interruption failed: {ended.err[-2000:]}")
        return json.loads((self.reference / "events.json").read_text())  # type: ignore[no-any-return]

    def cell(self, stage: str, event: int, way: str) -> list[str]:
        """Interrupts a run there, resumes it, and returns what is wrong."""
        cwd = self.disk / "run"
        shutil.rmtree(cwd, ignore_errors=True)
        folder, before = cwd / "runs" / "quickstart", self.reference / "before" / stage
        if before.is_dir():
            shutil.copytree(before, folder)
        action = "pause" if way == "two at once" else way
        child = self.run(cwd, trigger=Trigger(stage, event, action))
        wrong = []
        if way == "two at once":
            os.waitpid(child, os.WUNTRACED)
            wrong += self._second(cwd, event)
            os.kill(child, signal.SIGCONT)
        ended = self.wait(child)
        (cwd / FILLER).unlink(missing_ok=True)
        wrong += self._ended(ended, way) + self._half_written(folder, way)
        resumed = self.wait(self.run(cwd))
        if resumed.code != 0:
            return [*wrong, f"resuming: exit code {resumed.code}: {resumed.err.strip()[-300:]}"]
        return wrong + self._differs(folder)

    def _second(self, cwd: Path, event: int) -> list[str]:
        """Another run of the same folder while the first one stands still; every other time with other settings."""
        ended = self.wait(self.run(cwd, ("train.steps=3",) if event % 2 else ()))
        if ended.code != 2 or "Traceback" in ended.err or len(_errors(ended.err)) != 1:
            return [f"the second process: exit code {ended.code}: {ended.err.strip()[-300:]}"]
        return []

    @staticmethod
    def _ended(ended: Ended, way: str) -> list[str]:
        wrong = []
        done = way == "full disk" and ended.code == 0  # nothing was left to write
        if ended.code not in CODES[way] and not done:
            wrong.append(f"exit code {ended.code}, not {' or '.join(map(str, CODES[way]))}: {ended.err.strip()[-300:]}")
        if "Traceback" in ended.err:
            wrong.append(f"a traceback: {ended.err.strip().splitlines()[-1][:300]}")
        if way == "full disk" and not done and len(_errors(ended.err)) != 1:
            wrong.append(f"not one error line: {ended.err.strip()[-300:]}")
        return wrong

    @staticmethod
    def _half_written(folder: Path, way: str) -> list[str]:
        """Visible files are whole; what was being written has a hidden name, and is gone where it could be removed."""
        if not folder.is_dir():
            return []
        files = [path.relative_to(folder) for path in folder.rglob("*")]
        hidden = [path for path in files if any(re.fullmatch(r"\..+\.surgery-\d+\.tmp", part) for part in path.parts)]
        seen = [str(path) for path in files if path not in hidden]
        fault = broken(folder, seen)
        wrong = [f"half-written: {fault}"] if fault else []
        if hidden and way not in ("SIGKILL", "SIGTERM"):
            wrong.append(f"left behind: {hidden[0]}")
        return wrong

    def _differs(self, folder: Path) -> list[str]:
        """What is not as in the run without interruption."""
        whole, wrong = self.reference / "runs" / "quickstart", []
        for name in WEIGHTS:
            files = sorted(path.relative_to(whole) for path in (whole / name).glob("*.safetensors"))
            assert files, f"the reference has no weights in {name}"
            wrong += [f"other bits: {f}" for f in files if (folder / f).read_bytes() != (whole / f).read_bytes()]
        for name in ("heads.json", "plan.json", "splice.json"):
            if (folder / name).read_bytes() != (whole / name).read_bytes():
                wrong.append(f"other content: {name}")
        arms = [json.loads((run / "results.json").read_text())["arms"] for run in (folder, whole)]
        if arms[0] != arms[1]:
            wrong.append("other results: results.json")
        left = [path.relative_to(folder.parent) for path in folder.parent.rglob("*") if _LEFT.fullmatch(path.name)]
        return [*wrong, f"left behind: {left[0]}"] if left else wrong


def _errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


def mounted(folder: Path) -> Callable[[], None] | None:
    """Mounts a small disk there; returns what unmounts it, or None where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    if folder.is_mount():  # of a matrix that was interrupted
        subprocess.run(["umount", str(folder)], check=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}m", "tmpfs", str(folder)]
    try:
        if subprocess.run(command, capture_output=True).returncode != 0:
            return None
    except FileNotFoundError:
        return None
    return lambda: subprocess.run(["umount", str(folder)], check=True) and None


def print_table(cells: dict[str, dict[str, Any]]) -> None:
    """Good and all, by stage and way; then what is wrong."""
    print(f"{'':10}" + "".join(f"{way:>14}" for way in WAYS))
    for stage in STAGES:
        row = []
        for way in WAYS:
            mine = [cell for cell in cells.values() if (cell["stage"], cell["way"]) == (stage, way)]
            row.append(f"{sum(not cell['wrong'] for cell in mine)} of {len(mine)}" if mine else "-")
        print(f"{stage:10}" + "".join(f"{text:>14}" for text in row))
    for key, cell in cells.items():
        for line in cell["wrong"]:
            print(f"{key} ({cell['event']}): {line}")
    print(f"{sum(not cell['wrong'] for cell in cells.values())} of {len(cells)} as they should be")


def main(given: list[str] | None = None) -> int:
    """Exit code 0 where every cell is as it should be."""
    parser = argparse.ArgumentParser(prog="make kills KILLS=", description=__doc__)
    parser.add_argument("--folder", type=Path, help="of results, to go on with; a temporary one if not set")
    parser.add_argument("--stage", choices=STAGES, action="append", help="these alone")
    parser.add_argument("--way", choices=WAYS, action="append", help="these alone")
    parser.add_argument("--again", action="store_true", help="do those again that were wrong")
    options = parser.parse_args(given)
    root = (options.folder or Path(tempfile.mkdtemp(prefix="kills-"))).resolve()
    root.mkdir(parents=True, exist_ok=True)
    file = root / "kills.json"
    summary: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"cells": {}}
    cells = summary["cells"]
    unmount = mounted(root / "disk")
    matrix = Matrix(root)
    try:
        events = matrix.make_reference()
        for stage in options.stage or STAGES:
            for way in options.way or WAYS:
                if way == "full disk" and unmount is None:
                    continue
                for number, event in enumerate(moments(len(events[stage]))):
                    key = f"{stage}, {way}, {number}"
                    if key in cells and not (options.again and cells[key]["wrong"]):
                        continue
                    what = re.sub(r"\.surgery-\d+\.tmp", ".tmp", events[stage][event])
                    wrong = matrix.cell(stage, event, way)
                    cells[key] = {"stage": stage, "way": way, "event": what, "wrong": wrong}
                    summary |= _facts()
                    file.write_text(json.dumps(summary, indent=1) + "\n")
                    print(f"{key} ({what}): {wrong or 'good'}", flush=True)
    finally:
        matrix.stock.stop()
        if unmount is not None:
            unmount()
    print_table(cells)
    if unmount is None:
        print("No disk could be mounted, so `full disk` was skipped. Use root, or unshare --map-root-user --mount.")
    print(f"results: {file}")
    return int(any(cell["wrong"] for cell in cells.values()))


def _facts() -> dict[str, Any]:
    from surgery.run.evaluate_stage import versions

    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {"date": date, "versions": versions()}


if __name__ == "__main__":
    sys.exit(main())
