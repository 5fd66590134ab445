"""Folders that this toolkit writes: atomic writes, hashes, what may be replaced, manifests and freshness of a run.

A file or folder is written beside its place and renamed into it, so that it is whole or absent. Only what this toolkit
wrote is replaced, and never what a command reads. A stage's manifest is written last: if it is there and matches, the
stage's outputs are.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from surgery.errors import RunError, SurgeryError


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        _sync(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Write a file, or the names in a folder, to the disk itself: a crash of the machine does not take them back."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not path.is_dir() or is_full(error):  # some network file systems cannot do it for folders
            raise
    finally:
        os.close(descriptor)


_FULL = ("no space left", "quota exceeded", "os error 28", "os error 122", "unexpected pos", "file write failed")


def is_full(error: BaseException) -> bool:
    """Whether a write failed for lack of room.

    safetensors and torch have errors of their own, and sharded saving one that holds those of all processes.
    """
    if isinstance(error, SurgeryError):
        return False
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict):
        return any(is_full(one) for one, _ in failures.values())
    return any(words in str(error).lower() for words in _FULL)


def write_json(path: Path, data: Any) -> None:
    """Writes JSON whole or not at all; NaN is refused, since it is no JSON."""
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Raises RunError when the file is missing or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(str(path), None, "This file is missing; run the stage that writes it.") from None
    except (ValueError, RecursionError):
        raise RunError(str(path), "not JSON", "Delete it and run the stage that writes it.") from None


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields a folder beside `path` to fill; on success it replaces `path`, on failure nothing is left.

    Raises:
        RunError: the disk is full, whatever the library that wrote calls it.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    try:
        yield beside
        for written in (*beside.rglob("*"), beside):
            _sync(written)
        if path.exists():
            old = path.with_name(f".{path.name}.{os.getpid()}.old")
            os.rename(path, old)
            os.rename(beside, path)
            _sync(path.parent)
            shutil.rmtree(old)
        else:
            os.rename(beside, path)
            _sync(path.parent)
    except BaseException as error:  # sharded saving raises no `Exception`
        if not is_full(error):
            raise
        raise RunError(str(path), "the disk is full", "Make room, and run the same command again.") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


_LEFT_OVER = re.compile(r"\.(.+)\.\d+\.(tmp|old)")  # what `write_text` and `new_folder` call their own


def sweep(folder: Path, name: str | None = None) -> None:
    """Removes what a killed process left half-written; brings back a folder that was being replaced.

    Args:
        name: of the one file or folder to do this for; all in `folder` by default.
    """
    for entry in list(folder.iterdir()):
        match = _LEFT_OVER.fullmatch(entry.name)
        if match is None or name not in (None, match[1]):
            continue
        target = folder / match[1]
        if match[2] == "old" and not target.exists():
            os.rename(entry, target)
        elif entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def digest(*paths: Path) -> str:
    """sha256 over the names and bytes of files and folders. Hidden and missing files do not count."""
    total = hashlib.sha256()
    for path in paths:
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        for file in files:
            if not any(part.startswith(".") for part in file.relative_to(path.parent).parts):
                total.update(str(file.relative_to(path.parent)).encode() + b"\0")
                with open(file, "rb") as handle:
                    for block in iter(lambda: handle.read(1 << 20), b""):
                        total.update(block)
    return total.hexdigest()


def fingerprint(data: Any) -> str:
    """sha256 of plain data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()


def read_mapping(path: Path) -> dict[str, Any]:
    """A file of one JSON object; empty if it is missing or is anything else."""
    try:
        data = json.loads(text_or_empty(path))
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def text_or_empty(path: Path) -> str:
    """A small file's text; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
