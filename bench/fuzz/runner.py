"""Run one case in a forked child and judge its outcome."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from bench.fuzz import guard
from bench.fuzz.cases import Case
from bench.fuzz.values import ROOT
from tests.support.forked import redirect, run_and_exit
from tests.support.processes import Reloads

LIMIT = 10.0  # seconds
MEMORY = 12 << 30  # address space: a bomb ends with MemoryError, not with the machine
_OURS = re.compile(r"\.lock$|\.surgery-\d+\.tmp(/\.surgery\.json)?$")
_EMPTY = hashlib.blake2b(b"", digest_size=16).hexdigest()  # in a `Snapshot`
FINE, REFUSED = "exit 0", "refused"
_PARTIAL = re.compile(r"\..+\.surgery-\d+\.tmp|.*\.(part|incomplete|tmp)")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a terminal would obey it
_FRAME = re.compile(r'File "[^"]*?/((?:surgery|tests|bench)/[^"]+)", line (\d+),? in (\S+)')
Snapshot = dict[str, str]


@dataclass(frozen=True)
class Ended:
    """How a command ended: `code` is negative for a signal, None where it was stopped after the limit."""

    code: int | None
    out: str
    err: str
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """What became of a case.

    Attributes:
        outcome: `exit 0`, `refused`, or what is wrong.
        group: of findings that have one cause: the exception and its frame.
        line: the last line of the traceback, or the error line.
    """

    outcome: str
    group: str
    line: str
    seconds: float

    @property
    def good(self) -> bool:
        return self.outcome in (FINE, REFUSED)


def fork(
    case: Case, place: Path, shared: Path, main: Callable[[], None], reloads: Reloads | None, debug: bool = False
) -> Ended:
    """The command in a forked child that is watched.

    Args:
        shared: caches that it may write to.
        debug: the traceback of an internal error is printed too.
    """
    out, err = place / "out", place / "err"
    (place / "tmp").mkdir(exist_ok=True)
    began = time.perf_counter()
    child = os.fork()
    if child == 0:
        os.environ["SURGERY_DEBUG"] = "1" if debug else "0"
        _become(case, place, shared, main, reloads)
    code = _wait(child, began + LIMIT)
    seconds = time.perf_counter() - began
    return Ended(code, out.read_text("utf-8", "replace"), err.read_text("utf-8", "replace"), seconds)


def start(case: Case, place: Path) -> Ended:
    """The command as a user starts it."""
    began = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "surgery", *case.arguments]
    try:
        done = subprocess.run(command, cwd=place / "work", env=environment, capture_output=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return Ended(None, "", "", time.perf_counter() - began)
    texts = [text.decode("utf-8", "replace") for text in (done.stdout, done.stderr)]
    return Ended(done.returncode, *texts, time.perf_counter() - began)


def _wait(child: int, deadline: float) -> int | None:
    """The exit code; None where it had to be killed."""
    pause = 0.0005
    while time.perf_counter() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)
    os.kill(child, signal.SIGUSR1)  # faulthandler says where it is
    time.sleep(0.3)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _become(case: Case, place: Path, shared: Path, main: Callable[[], None], reloads: Reloads | None) -> NoReturn:
    """Run the command, in the child."""

    def command() -> None:
        os.setpgid(0, 0)
        redirect(place / "out", place / "err")
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115  (a test may have replaced it)
        sys.stderr = sys.__stderr__ = open(2, "w", closefd=False)  # noqa: SIM115
        import faulthandler

        faulthandler.register(signal.SIGUSR1, all_threads=False)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        import tempfile

        tempfile.tempdir = os.environ["TMPDIR"] = str(place / "tmp")
        if reloads is not None:
            import surgery.export.reload

            surgery.export.reload.subprocess = reloads  # type: ignore[assignment]
        os.chdir(place / "work")
        sys.path[0] = str(place / "work")
        sys.argv = ["surgery", *case.arguments]
        sys.dont_write_bytecode = True
        guard.watch(place, place / "log", [shared], [place, shared])
        main()

    run_and_exit(command)


def snapshot(folder: Path) -> Snapshot:
    """Every file below a folder by its path: kind and content."""
    found: Snapshot = {}
    stack = [os.fspath(folder)]
    while stack:
        for entry in os.scandir(stack.pop()):
            status = entry.stat(follow_symlinks=False)
            path = os.path.relpath(entry.path, folder)
            if entry.is_symlink():
                found[path] = f"link to {os.readlink(entry.path)}"
            elif stat.S_ISREG(status.st_mode):
                with open(entry.path, "rb") as file:
                    found[path] = hashlib.blake2b(file.read(), digest_size=16).hexdigest()
            elif entry.is_dir(follow_symlinks=False):
                found[path] = "folder"
                stack.append(entry.path)
            else:
                found[path] = "special"
    return found


def judge(case: Case, place: Path, before: Snapshot, ended: Ended) -> Verdict:
    """What is wrong with how a command ended and with what it left, the worst first."""
    log = (place / "log").read_text("utf-8", "replace") if (place / "log").is_file() else ""
    last = next((line for line in reversed(ended.err.splitlines()) if line.strip()), "")[:300]

    def verdict(outcome: str, group: str, line: str = last) -> Verdict:
        return Verdict(outcome, group, line, round(ended.seconds, 3))

    ran = [line for line in log.splitlines() if line.startswith(("code ran", "started a process"))]
    if (place / "marker").exists() or ran:
        return verdict("code ran", case.arguments[0], ran[0] if ran else "the payload wrote its marker")
    outside = [line for line in log.splitlines() if line.startswith("wrote outside")]
    if outside:
        return verdict("wrote outside", case.arguments[0], outside[0])
    if ended.code is None:
        return verdict("hang", where(ended.err), f"more than {LIMIT:g} s")
    if "Traceback (most recent call last)" in ended.err + ended.out:
        return verdict("traceback", f"{last.removeprefix('internal error: ').split(':')[0]} at {where(ended.err)}")
    if ended.code < 0:
        return verdict("crash", signal.Signals(-ended.code).name)
    if control := _CONTROL.search(ended.out + ended.err):
        return verdict("control character", case.arguments[0], ascii(control[0]))
    if last.startswith("internal error: "):
        return verdict("internal error", last[:120])
    if ended.code not in (0, 2):
        return verdict("exit code", str(ended.code))
    after = snapshot(place / "work")
    changed = [path for path, what in before.items() if after.get(path) != what and not _may_write(case, path)]
    # Nothing is lost: an empty file is taken as a lock, as by flock(1), and empty temporary folders are removed.
    changed = [path for path in changed if not (before[path] in (_EMPTY, "folder") and _OURS.search(path))]
    if changed:
        return verdict("input changed", case.arguments[0], f"{changed[0]}: {after.get(changed[0], 'gone')}")
    new = sorted(set(after) - set(before))
    partial = [path for path in new if _PARTIAL.fullmatch(os.path.basename(path))]
    stray = [path for path in new if not _may_write(case, path)]
    if partial or stray:
        return verdict("half-written", case.arguments[0], f"left {(partial or stray)[0]}")
    fault = broken(place / "work", [path for path, what in after.items() if before.get(path) != what])
    if fault:
        return verdict("half-written", case.arguments[0], fault)
    lines = [line for line in ended.err.splitlines() if line.lower().startswith("error: ")]
    if ended.code == 2 and len(lines) != 1:
        return verdict("no error line" if not lines else "several error lines", case.arguments[0])
    return verdict(FINE if ended.code == 0 else REFUSED, "", lines[0][:300] if lines else "")


def _may_write(case: Case, path: str) -> bool:
    return path.split("/")[0] in case.writes


def where(text: str) -> str:
    """The innermost frame of the library's own."""
    frames = [frame for frame in _FRAME.findall(text) if frame[0].startswith("surgery/")]
    if not frames:
        return "no frame of the library"
    path, _, function = frames[0] if "most recent call first" in text else frames[-1]
    return f"{path}:{function}"


def broken(folder: Path, paths: list[str]) -> str:
    """The first new file that is not what its name says, or an index that names no file."""
    for name in paths:
        path = folder / name
        if path.is_symlink() or not path.is_file():
            continue
        try:
            if path.suffix == ".json":
                found = json.loads(path.read_bytes())
                shards = found.get("weight_map", {}) if path.name.endswith(".index.json") else {}
                missing = [shard for shard in set(shards.values()) if not (path.parent / shard).is_file()]
                if missing:
                    return f"{name} names {missing[0]}"
            elif path.suffix == ".safetensors":
                _read_header(path)
        except (ValueError, AttributeError, TypeError) as error:
            return f"{name}: {error}"
    return ""


def _read_header(path: Path) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    if len(data) != 8 + length + end:
        raise ValueError(f"{len(data)} bytes, and its header says {8 + length + end}")
