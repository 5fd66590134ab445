"""Hold a folder for one process: no two commands write into the same one at a time."""

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


@contextmanager
def hold(folder: Path, field: str = "folder") -> Iterator[None]:
    """Hold `folder`; every command that writes into a folder does.

    The kernel drops the lock when its process ends, however it ends. The file `.NAME.lock` beside the folder, or in
    it where nothing can be written beside it, names the holder. On a shared file system without locks that is all
    there is. What a killed holder left half-written beside the folder is swept.

    Raises:
        RunError: another process holds it, or one on another machine did not release it; the disk is full.
    """
    real = Path(os.path.realpath(folder))
    beside = os.access(next(p for p in (*real.parents, real) if p.exists()), os.W_OK)
    path = real.parent / f".{real.name}.lock" if beside else real / ".lock"
    made = [parent for parent in path.parents if not parent.exists()]
    lock = _locked(path, folder, field)
    try:
        os.ftruncate(lock, 0)
        os.write(lock, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        if beside:
            sweep(real.parent, real.name)
        yield
    except BaseException as error:
        if not is_full(error):
            raise
        hint = "The disk is full. What was finished before is kept. Make room, and start again."
        raise RunError(field, str(folder), hint) from None
    finally:
        path.unlink(missing_ok=True)
        with suppress(OSError):  # the command wrote into it
            for parent in made:
                parent.rmdir()
        os.close(lock)


def _locked(path: Path, folder: Path, field: str) -> int:
    """A descriptor of the lock file, which this process has locked."""
    while True:
        with suppress(FileNotFoundError):  # its holder has just removed it, or the folder that it is in
            _make(path.parent)
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                _take(lock, path, folder, field)
                if os.path.samestat(os.stat(path), os.fstat(lock)):
                    return os.dup(lock)  # of the same lock
            finally:
                os.close(lock)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # or it was there, and its maker has just removed it
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
    except OSError:  # a file system without locks: a holder that is alive counts
        free = not Path(f"/proc/{holder.get('pid')}").exists()
    if not free:
        who = f"Process {holder['pid']} on {holder['host']}" if {"pid", "host"} <= holder.keys() else "Another process"
        hint = f"{who} writes into it. Wait until it ends; if it is gone, delete {path}."
        raise RunError(field, str(folder), hint)


__all__ = ["hold"]
