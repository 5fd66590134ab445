"""Lock a folder, so that no two commands write into it at the same time."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from surgery.errors import RunError
from surgery.files.atomic import is_full, read_mapping, sweep

_ATTEMPTS = 1000  # to lock a file that other processes remove


@contextmanager
def hold(folder: Path, field: str = "folder") -> Iterator[None]:
    """Lock `folder` inside the context, and remove temporary entries that a killed process left next to it.

    The lock is on the file `.NAME.lock` next to the folder, or on `.lock` in it if its parent is not writable. The file
    names the process, and the kernel releases the lock when the process ends. On a file system without locks, the lock
    is held as long as the named process exists. The lock of a process on another machine is held until the file is
    deleted.

    Args:
        folder: folder to lock. It need not exist.
        field: recipe field or argument that names the folder, for errors.

    Raises:
        RunError: another process holds the lock, possibly on another machine; the folder cannot be created; or the disk
            is full.
    """
    real = Path(os.path.realpath(folder))
    writable = os.access(next(p for p in (*real.parents, real) if p.exists()), os.W_OK)
    path = real.parent / f".{real.name}.lock" if writable else real / ".lock"
    created = [parent for parent in path.parents if not parent.exists()]
    lock = _locked(path, folder, field)
    try:
        os.ftruncate(lock, 0)
        os.write(lock, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        if writable:
            sweep(real.parent, real.name)
        yield
    except BaseException as error:
        if not is_full(error):
            raise
        hint = "The disk is full. Finished results are kept. Free some space and run the same command again."
        raise RunError(field, str(folder), hint) from None
    finally:
        path.unlink(missing_ok=True)
        with suppress(OSError):  # not empty: the command wrote into it
            for parent in created:
                parent.rmdir()
        os.close(lock)


def _locked(path: Path, folder: Path, field: str) -> int:
    """Open and lock the lock file, and return its descriptor."""
    for _ in range(_ATTEMPTS):
        with suppress(FileNotFoundError):  # another process has just removed it, or its folder
            _make(path.parent)
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                _take(lock, path, folder, field)
                if os.path.samestat(os.stat(path), os.fstat(lock)):
                    return os.dup(lock)  # the copy keeps the lock
            finally:
                os.close(lock)
    raise RunError(field, str(folder), f"{path.parent} cannot be created. Choose another folder.")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # it existed, and may have been removed since
        if folder.is_file():
            raise


def _take(lock: int, path: Path, folder: Path, field: str) -> None:
    holder, here = read_mapping(path), socket.gethostname()
    try:
        free = holder.get("host", here) == here
        if free:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        free = False
    except OSError:  # a file system without locks: check whether the process is alive
        free = not Path(f"/proc/{holder.get('pid')}").exists()
    if not free:
        who = f"Process {holder['pid']} on {holder['host']}" if {"pid", "host"} <= holder.keys() else "Another process"
        hint = f"{who} is writing into it. Wait until it ends. If it has ended, delete {path}."
        raise RunError(field, str(folder), hint)


__all__ = ["hold"]
