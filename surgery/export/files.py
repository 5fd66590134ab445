"""The files of an exported folder, as a stranger may have left them: plain ones only, those that are listed, and
documents whose errors name them."""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from surgery.errors import ModelError, reading

RECORD, REFERENCE = "export.json", "reference.safetensors"
AGAIN = "Download it again, or export again."
# A file that a loader could load although nobody listed it.
LOADED = (".py", ".json", ".safetensors", ".bin", ".pt", ".pth", ".jinja")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def read_json_file(folder: Path, name: str) -> Any:
    """Raises ModelError where the file is missing, not UTF-8, not JSON, or nested too deeply."""
    if not (folder / name).is_file():
        raise ModelError(name, "missing", AGAIN)
    with reading(name, "not JSON", AGAIN):
        return json.loads((folder / name).read_text(encoding="utf-8"))


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object. Raises ModelError as `read_json_file`."""
    data = read_json_file(folder, name)
    if not isinstance(data, dict):
        raise ModelError(name, type(data).__name__, f"It should be a JSON object. {AGAIN}")
    return data


def check_entries(folder: Path) -> None:
    """Refuse links and special files, hidden ones too: what they stand for is no part of the folder.

    Raises:
        ModelError: names the first entry that is neither a plain file nor a folder.
    """
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            value = "a symbolic link" if stat.S_ISLNK(mode) else "a special file"
            hint = "An export holds plain files only. Replace it with a copy of the file, or remove it."
            raise ModelError(shown(path.relative_to(folder).as_posix()), value, hint)


def visible_files(folder: Path) -> list[Path]:
    """Files in order, without the hidden ones and compiled Python that version control and download tools leave."""
    found = []
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(p.startswith(".") or p == "__pycache__" for p in parts):
            found.append(path)
    return found


def fingerprints(folder: Path) -> dict[str, dict[str, Any]]:
    """`sha256` and `size` of every file below the folder by its relative path, but `export.json` and hidden ones."""
    found = {}
    for path in visible_files(folder):
        name = path.relative_to(folder).as_posix()
        if name != RECORD:
            found[name] = {"sha256": sha256_of(path), "size": path.stat().st_size}
    return found


def sha256_of(path: Path) -> str:
    """The hex digest of a file's bytes."""
    total = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            total.update(block)
    return total.hexdigest()


def check_files(folder: Path, listed: Any) -> list[str]:
    """Compare every file with what is listed; give a sentence on files that are not, and do no harm.

    Args:
        listed: `files` of export.json.

    Raises:
        ModelError: names the first file that is missing, of another length or content, or that a loader would load
            although it is not listed; or the list is malformed.
    """
    if not isinstance(listed, Mapping):
        raise ModelError(RECORD, f"files: {type(listed).__name__}", f"It should be an object. {AGAIN}")
    for name, expected in listed.items():
        _check_entry(name, expected)
        path = folder / name
        if not path.is_file():
            raise ModelError(name, "missing", f"{RECORD} lists it. {AGAIN}")
        size = path.stat().st_size
        if size != expected["size"]:
            value = f"{size} bytes long, and {RECORD} says {expected['size']}"
            raise ModelError(name, value, f"It is cut off or changed. {AGAIN}")
        if sha256_of(path) != expected["sha256"]:
            raise ModelError(name, f"another sha256 than {RECORD} lists", f"It was changed. {AGAIN}")
    extra = [p.relative_to(folder).as_posix() for p in visible_files(folder)]
    extra = sorted(set(extra) - set(listed) - {RECORD})
    for name in extra:
        if Path(name).suffix in LOADED:
            hint = "It was added later, and could be loaded. Remove it."
            raise ModelError(shown(name), f"not listed in {RECORD}", hint)
    return [f"{', '.join(map(shown, extra))}: not listed in {RECORD}"] if extra else []


def _check_entry(name: str, expected: Any) -> None:
    """Raises ModelError where a name could point out of the folder, or its entry is no size and sha256."""
    path = PurePosixPath(name)
    is_plain = name.isprintable() and "\\" not in name and path.as_posix() == name and ".." not in path.parts
    if not is_plain or not path.parts or path.is_absolute():
        raise ModelError(shown(name), "missing", f"{RECORD} lists it, and it is no path inside the folder. {AGAIN}")
    size, digest = (expected.get("size"), expected.get("sha256")) if isinstance(expected, Mapping) else (None, None)
    if type(size) is not int or size < 0:
        raise ModelError(RECORD, f"files: {name}: size {str(size)[:40]!r}", f"It should be a number of bytes. {AGAIN}")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        value = f"files: {name}: sha256 {str(digest)[:40]!r}"
        raise ModelError(RECORD, value, f"It should be 64 hexadecimal digits. {AGAIN}")


def shown(name: str) -> str:
    """A file's name as one line of an error can hold it."""
    return name if name.isprintable() else repr(name)
