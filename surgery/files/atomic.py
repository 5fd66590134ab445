"""Write files and folders atomically, read small ones, and hash them.

A file or folder is written next to its destination, in a temporary folder with a mark, and renamed. So it is complete
or absent, and what a killed process leaves is told from the files of others. Nothing is written through a link.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from surgery.errors import RunError, SurgeryError

MARK = ".surgery.json"  # in a folder that this toolkit wrote; `files.ownership`
HELD: dict[Path, Path] = {}  # real paths of the folders that `files.lock` holds, by the absolute paths that name them


def check_links(path: Path) -> None:
    """Refuse a path that a symbolic link below a held folder is part of. This toolkit makes no links there.

    Raises:
        RunError: names the path.
    """
    absolute = Path(os.path.abspath(path))
    for named, real in list(HELD.items()):  # other threads may hold folders
        if absolute.is_relative_to(named) and Path(os.path.realpath(path)) != real / absolute.relative_to(named):
            raise RunError(str(path), "a symbolic link, or in one", "Replace the link with what it leads to.")


def open_regular(path: Path, flags: int) -> int:
    """Open a regular file and return its descriptor. Does not wait for the writer of a pipe.

    Args:
        flags: of `os.open`. A file to write must have no other name: neither a symbolic nor a hard link.

    Raises:
        RunError: the file is something else.
        OSError: it cannot be opened.
    """
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    if writes and path.is_symlink():
        raise RunError(str(path), "a symbolic link", "Remove it: nothing is written through a link.")
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if writes else 0), 0o666)
    status = os.fstat(handle)
    if stat.S_ISREG(status.st_mode) and (not writes or status.st_nlink <= 1):
        return handle
    os.close(handle)
    kind = "a file with several names (hard links)" if stat.S_ISREG(status.st_mode) else "not a regular file"
    raise RunError(str(path), kind, "Remove it, or replace it with a copy.")


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """Yield a new folder next to `target`, which is removed at the end. Its mark proves to `sweep` who made it.

    Raises:
        RunError: the name of `target` is too long for the folder's.
    """
    check_links(target.parent)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.with_name(f".{target.name}.surgery-{secrets.randbelow(10**9)}.tmp")
    try:
        folder.mkdir()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise RunError(str(target), None, "Its name is too long. Set a shorter one.") from error
    try:
        (folder / MARK).write_text(json.dumps({"kind": _TEMPORARY, "of": target.name}), encoding="utf-8")
        yield folder
    finally:
        try:
            _discard(folder)
        except BaseException:  # an interrupt comes in between
            _discard(folder)
            raise


def _discard(folder: Path) -> None:
    """Remove a temporary folder, as far as it can be removed."""
    with suppress(OSError):
        _remove_marked(folder)


def _remove_marked(folder: Path) -> None:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name == MARK):  # the mark last: it is the proof
        delete(entry)
    folder.rmdir()


def delete(path: Path) -> None:
    """Remove a file, a link or a folder, if it exists. What links lead to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield the path of a file to write, which replaces `path` on success: `path` is complete or unchanged."""
    with staging(path) as beside:
        new = beside / f"new{path.suffix}"
        yield new
        _sync(new)
        os.replace(new, path)
        _sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: it is complete or unchanged."""
    with new_file(path) as new:
        new.write_text(text, encoding="utf-8")


def _sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk, so that they survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not path.is_dir() or is_full(error):  # some network file systems do not support it for folders
            raise
    finally:
        os.close(descriptor)


_FULL = ("no space left", "quota exceeded", "os error 28", "os error 122", "unexpected pos", "file write failed")


def is_full(error: BaseException) -> bool:
    """True if a write failed because the disk is full. safetensors and torch raise their own errors."""
    if isinstance(error, SurgeryError):
        return False
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return any(words in str(error).lower() for words in _FULL)


def write_json(path: Path, data: Any) -> None:
    """Write JSON atomically.

    Raises:
        ValueError: the data holds NaN or infinity.
    """
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Parse a JSON file of a run.

    Raises:
        RunError: the file is missing or is not JSON.
    """
    try:
        return json.loads(_read(path))
    except FileNotFoundError:
        raise RunError(str(path), None, "This file is missing. Run the stage that writes it.") from None
    except SurgeryError:
        raise
    except (ValueError, RecursionError):
        raise RunError(str(path), "not JSON", "Delete it and run the stage that writes it.") from None


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `path` on success and is removed on failure.

    Raises:
        RunError: the disk is full.
    """
    path = HELD.get(Path(os.path.abspath(path)), path)  # the link that names a held folder stays
    try:
        with staging(path) as beside:
            new = beside / "new"
            new.mkdir()
            yield new
            for entry in (*new.rglob("*"), new):
                _sync(entry)
            try:
                if os.path.lexists(path):
                    os.rename(path, beside / _OLD)
                os.rename(new, path)
            except BaseException:
                if os.path.lexists(beside / _OLD) and not os.path.lexists(path):
                    os.rename(beside / _OLD, path)
                raise
            _sync(path.parent)
    except Exception as error:
        if not is_full(error):
            raise
        raise RunError(str(path), "the disk is full", "Free some space and run the same command again.") from error


def copy_entry(source: Path, target: Path) -> None:
    """Copy a file or a folder atomically. Weights (`*.safetensors`) become hard links if the file system has them.

    Files of this toolkit are replaced and never changed in place, so a link keeps its content.
    """
    if source.is_dir():
        with new_folder(target) as folder:
            shutil.copytree(source, folder, dirs_exist_ok=True, copy_function=_copy_or_link)
    else:
        with new_file(target) as new:
            _copy_or_link(str(source), str(new))


def _copy_or_link(source: str, target: str) -> None:
    if source.endswith(".safetensors"):
        try:
            os.link(source, target)
            return
        except OSError as error:
            if is_full(error):
                raise
    shutil.copyfile(source, target)


_TEMPORARY, _OLD = "temporary", "old"


def leftover_of(entry: Path) -> str | None:
    """Name of the file or folder that a killed process was writing in `entry`; None if `entry` is something else."""
    match = re.fullmatch(r"\.(.+)\.surgery-\d+\.tmp", entry.name)
    if match is None or entry.is_symlink() or not entry.is_dir():
        return None
    mark = entry / MARK
    is_marked = not mark.is_symlink() and read_mapping(mark) == {"kind": _TEMPORARY, "of": match[1]}
    with suppress(OSError):  # somebody else's, which cannot be read
        # Killed before the mark was written: nothing is lost with it.
        is_empty = all(path.name == MARK and path.lstat().st_size == 0 for path in entry.iterdir())
        return match[1] if is_marked or is_empty else None
    return None


def sweep(folder: Path, name: str | None = None) -> None:
    """Remove temporary folders that a killed process left, and restore a folder that it was replacing.

    Args:
        folder: folder to clean up, without its subfolders.
        name: only what was left of this file or folder; all if None.
    """
    check_links(folder)
    for entry in list(folder.iterdir()):
        target = leftover_of(entry)
        if target is None or name not in (None, target):
            continue
        if os.path.lexists(entry / _OLD) and not os.path.lexists(folder / target):
            os.rename(entry / _OLD, folder / target)
        _discard(entry)


def digest(*paths: Path) -> str:
    """Compute the SHA-256 of the names and bytes of files and folders, without hidden files inside and missing ones."""
    total = hashlib.sha256()
    for path in paths:
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        for file in files:
            if not any(part.startswith(".") for part in file.relative_to(path).parts):
                total.update(str(file.relative_to(path.parent)).encode() + b"\0")
                with open(file, "rb") as handle:
                    for block in iter(lambda: handle.read(1 << 20), b""):
                        total.update(block)
    return total.hexdigest()


def fingerprint(data: Any) -> str:
    """Compute the SHA-256 of JSON-like data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()


def read_mapping(path: Path) -> dict[str, Any]:
    """Parse a JSON object; empty if the file is missing or holds anything else."""
    try:
        data = json.loads(text_or_empty(path))
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def text_or_empty(path: Path) -> str:
    """Read a small file; empty if it cannot be read, or is a pipe or a device."""
    try:
        return _read(path)
    except (OSError, ValueError):
        return ""


def _read(path: Path) -> str:
    with open(open_regular(path, os.O_RDONLY), encoding="utf-8") as file:
        return file.read()
