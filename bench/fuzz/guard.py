"""Restrict a case from inside its process, with an audit hook that Python code cannot remove.

A write outside the case's folder ends the process before it happens. Executed code of the input and started processes
are logged.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STOPPED = 97  # exit code of a case that wanted to write elsewhere
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PATHS = {  # event -> places of its paths, and of the folder descriptors that they are relative to
    "os.remove": ((0, 1),), "os.rmdir": ((0, 1),), "os.mkdir": ((0, 2),), "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),), "os.truncate": ((0, None),), "os.chmod": ((0, 2),), "shutil.rmtree": ((0, 1),),
}  # fmt: skip
_PROCESSES = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "os.fork")


def watch(place: Path, log: Path, allowed: Sequence[Path], inputs: Sequence[Path]) -> None:
    """Watches this process for the rest of its life.

    Args:
        place: the case's folder; it may be written to.
        log: gets a line for everything that is not as it should be.
        allowed: other folders that may be written to.
        inputs: folders whose Python files must not be run.
    """
    roots = (*(os.path.realpath(path) for path in (place, *allowed)), "/dev")
    code = tuple(f"{os.path.realpath(path)}/" for path in inputs)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(what: str) -> None:
        os.write(descriptor, what.encode("utf-8", "replace") + b"\n")

    def check(path: Any, folder: Any, event: str) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return
        name = os.fsdecode(path)
        if isinstance(folder, int) and folder >= 0:
            name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
        parent, last = os.path.split(os.path.abspath(name))
        real = os.path.join(os.path.realpath(parent), last)
        if not any(real == root or real.startswith(root + "/") for root in roots):
            note(f"wrote outside: {event} {real}")
            os._exit(STOPPED)

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(given[2], int) and given[2] & _WRITES:
            check(given[0], None, event)
        elif event in _PATHS:
            for at, folder in _PATHS[event]:
                check(given[at], given[folder] if folder is not None and folder < len(given) else None, event)
        elif event in _PROCESSES:
            note(f"started a process: {event} {str(given[:2])[:300]}")
        elif event == "exec":
            name = getattr(given[0], "co_filename", "<")
            if not name.startswith("<") and os.path.realpath(name).startswith(code):
                note(f"code ran: {name}")

    sys.addaudithook(hook)
