"""Lock a folder, so that no two commands write into it at the same time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from surgery.errors import RunError
from surgery.files.atomic import HELD, check_links, is_full, open_regular, sweep

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
        RunError: another process holds the lock, possibly on another machine; the folder is a link to nothing or cannot
            be written; the lock file is a link or something else; or the disk is full.
    """
    named, real = Path(os.path.abspath(folder)), Path(os.path.realpath(folder))
    check_links(named)
    if os.path.islink(named) and not os.path.exists(named):
        raise RunError(field, str(folder), "It is a symbolic link to nothing. Set another folder, or remove the link.")
    writable = os.access(next(p for p in (*real.parents, real) if os.path.exists(p)), os.W_OK)
    path = real.parent / f".{real.name}.lock" if writable else real / ".lock"
    created = [parent for parent in path.parents if not os.path.exists(parent)]
    try:
        lock = _locked(path, folder, field)
    except OSError as error:
        raise _refusal(error, folder, field) from error
    HELD[named] = real
    try:
        os.ftruncate(lock, 0)
        os.write(lock, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        if writable:
            sweep(real.parent, real.name)
        yield
    except BaseException as error:
        if is_full(error):
            hint = "The disk is full. Finished results are kept. Free some space and run the same command again."
            raise RunError(field, str(folder), hint) from None
        if isinstance(error, OSError) and error.errno in _DENIED and _is_of(error.filename, real):
            raise _refusal(error, folder, field) from error
        raise
    finally:
        del HELD[named]
        if _is_at(lock, path):
            path.unlink()
        with suppress(OSError):  # not empty: the command wrote into it
            for parent in created:
                parent.rmdir()
        os.close(lock)


_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


def _is_of(path: Any, folder: Path) -> bool:
    """Whether a path is a folder, in it, a temporary entry beside it, or its parent."""
    if not isinstance(path, str | Path):
        return False
    real = Path(os.path.realpath(path))
    beside = folder.parent / real.relative_to(folder.parent).parts[0] if folder.parent in real.parents else real
    return beside in (folder, folder.parent) or beside.name.startswith(f".{folder.name}.")


def _refusal(error: OSError, folder: Path, field: str) -> RunError:
    if error.errno == errno.ENAMETOOLONG:  # of the folder, or with what is added for its lock
        return RunError(field, str(folder), "Its name is too long. Set a shorter one.")
    where = "" if error.filename is None else f" ({error.filename})"
    instead = "Set a folder that you can write into." if error.errno in _DENIED else "Set another folder."
    return RunError(field, str(folder), f"{error.strerror}{where}. {instead}")


def _is_at(lock: int, path: Path) -> bool:
    """Whether the open file still has this path."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(lock))
    except FileNotFoundError:
        return False


def _locked(path: Path, folder: Path, field: str) -> int:
    """Open and lock the lock file, and return its descriptor."""
    for _ in range(_ATTEMPTS):
        with suppress(FileNotFoundError, FileExistsError):  # another process has just removed it, or its folder
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = open_regular(path, os.O_RDWR | os.O_CREAT)
            try:
                _take(lock, path, folder, field)
                if _is_at(lock, path):
                    return os.dup(lock)  # the copy keeps the lock
            finally:
                os.close(lock)
    raise RunError(field, str(folder), f"{path.parent} cannot be created. Choose another folder.")


def _take(lock: int, path: Path, folder: Path, field: str) -> None:
    content, holder, here = os.pread(lock, 4096, 0), {}, socket.gethostname()
    with suppress(ValueError):
        holder = json.loads(content)
    if content and not (isinstance(holder, dict) and {"pid", "host"} <= holder.keys()):
        raise RunError(field, str(folder), f"{path} is in the way, and is not a lock of this toolkit. Move it away.")
    try:
        free = holder.get("host", here) == here
        if free:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        free = False
    except OSError:  # a file system without locks: check whether the process is alive
        free = not Path(f"/proc/{holder.get('pid')}").exists()
    if not free:
        who = f"Process {holder['pid']} on {holder['host']}" if holder else "Another process"
        hint = f"{who} is writing into it. Wait until it ends. If it has ended, delete {path}."
        raise RunError(field, str(folder), hint)
