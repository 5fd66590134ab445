"""Write files and folders atomically, read small ones, and hash them.

A file or folder is written next to its destination and renamed, so that it is complete or absent.
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
    """Write a file atomically: it is complete or unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


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
    """True if a write failed because the disk is full.

    safetensors and torch raise their own errors. Sharded saving raises one error that contains those of all processes.
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
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(str(path), None, "This file is missing. Run the stage that writes it.") from None
    except (ValueError, RecursionError):
        raise RunError(str(path), "not JSON", "Delete it and run the stage that writes it.") from None


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `path` on success and is removed on failure.

    Raises:
        RunError: the disk is full.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for entry in (*temporary.rglob("*"), temporary):
            _sync(entry)
        if path.exists():
            old = path.with_name(f".{path.name}.{os.getpid()}.old")
            os.rename(path, old)
            os.rename(temporary, path)
            _sync(path.parent)
            shutil.rmtree(old)
        else:
            os.rename(temporary, path)
            _sync(path.parent)
    except BaseException as error:  # sharded saving raises no `Exception`
        if not is_full(error):
            raise
        raise RunError(str(path), "the disk is full", "Free some space and run the same command again.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def copy_entry(source: Path, target: Path) -> None:
    """Copy a file or a folder atomically. Weights (`*.safetensors`) become hard links if the file system has them.

    Files of this toolkit are replaced and never changed in place, so a link keeps its content.
    """
    if source.is_dir():
        with new_folder(target) as folder:
            shutil.copytree(source, folder, dirs_exist_ok=True, copy_function=_copy_or_link)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        _copy_or_link(str(source), str(temporary))
        _sync(temporary)
        os.replace(temporary, target)
        _sync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _copy_or_link(source: str, target: str) -> None:
    if source.endswith(".safetensors"):
        try:
            os.link(source, target)
            return
        except OSError as error:
            if is_full(error):
                raise
    shutil.copyfile(source, target)


_LEFT_OVER = re.compile(r"\.(.+)\.\d+\.(tmp|old)")  # temporary names of `write_text` and `new_folder`


def sweep(folder: Path, name: str | None = None) -> None:
    """Remove temporary entries that a killed process left, and restore a folder that it was replacing.

    Args:
        folder: folder to clean up, without its subfolders.
        name: only entries of this file or folder; all if None.
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
    """Read a small file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
