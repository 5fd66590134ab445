"""List, hash and compare the files of an exported folder. The folder may come from an untrusted source."""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from surgery.errors import ModelError, reading

RECORD, CARD = "export.json", "README.md"
# Not a *.safetensors file: vLLM loads every one in a folder as weights.
REFERENCE = "reference.json"
AGAIN = "Download it again, or export again."
# Suffixes of files that transformers or torch could load.
LOADABLE = (".py", ".json", ".safetensors", ".bin", ".pt", ".pth", ".jinja")


def read_json_file(folder: Path, name: str) -> Any:
    """Parse a JSON file. Raise ModelError if it is missing, not UTF-8, not JSON, or nested too deeply."""
    if not (folder / name).is_file():
        raise ModelError(name, "missing", AGAIN)
    with reading(name, "not JSON", AGAIN):
        return json.loads((folder / name).read_text(encoding="utf-8"))


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """Parse a JSON file that holds an object. Raises as `read_json_file`, and for another type."""
    data = read_json_file(folder, name)
    if not isinstance(data, dict):
        raise ModelError(name, type(data).__name__, f"Expected a JSON object. {AGAIN}")
    return data


def check_entries(folder: Path) -> None:
    """Raise ModelError for symbolic links and special files, also hidden ones: they may point outside the folder."""
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            value = "a symbolic link" if stat.S_ISLNK(mode) else "a special file"
            hint = "An export holds regular files only. Replace it with a copy of the file, or remove it."
            raise ModelError(shown(path.relative_to(folder).as_posix()), value, hint)


def visible_files(folder: Path) -> list[Path]:
    """List the files in order, without hidden files and compiled Python, which other tools create."""
    files = ((path, path.relative_to(folder).parts) for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path, parts in files if not any(p.startswith(".") or p == "__pycache__" for p in parts)]


def fingerprints(folder: Path) -> dict[str, dict[str, Any]]:
    """Map the relative path of every visible file except export.json to its `sha256` and `size`."""
    files = {path.relative_to(folder).as_posix(): path for path in visible_files(folder)}
    files.pop(RECORD, None)
    return {name: {"sha256": sha256_of(path), "size": path.stat().st_size} for name, path in files.items()}


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_files(folder: Path, listed: Any, loadable: tuple[str, ...] = ()) -> list[str]:
    """Compare every file with its entry in export.json.

    Args:
        listed: `files` of export.json.
        loadable: suffixes of files that a loader reads, in addition to `LOADABLE`.

    Returns:
        One sentence on an edited README.md, and one on files that are not listed and that no loader reads, if any.

    Raises:
        ModelError: names the first file that is missing, of another size or content, or loadable and not listed; the
            list is malformed; or README.md is not UTF-8.
    """
    if not isinstance(listed, Mapping):
        raise ModelError(RECORD, f"files: {type(listed).__name__}", f"Expected a JSON object. {AGAIN}")
    edited = False
    for name, expected in listed.items():
        _check_entry(name, expected)
        path = folder / name
        if not path.is_file():
            raise ModelError(name, "missing", f"{RECORD} lists it. {AGAIN}")
        if name == CARD:  # the user may edit it
            edited = sha256_of(path) != expected["sha256"]
            continue
        size = path.stat().st_size
        if size != expected["size"]:
            value = f"{size} bytes long, but {RECORD} lists {expected['size']}"
            raise ModelError(name, value, f"It is truncated or changed. {AGAIN}")
        if sha256_of(path) != expected["sha256"]:
            raise ModelError(name, f"sha256 differs from {RECORD}", f"The file has changed. {AGAIN}")
    extra = sorted({p.relative_to(folder).as_posix() for p in visible_files(folder)} - {*listed, RECORD})
    for name in extra:
        if Path(name).suffix in (*LOADABLE, *loadable):
            hint = "It was added after the export and could be loaded. Remove it."
            raise ModelError(shown(name), f"not listed in {RECORD}", hint)
    if (folder / CARD).is_file():
        text = (folder / CARD).read_bytes()
        try:
            text.decode()
        except UnicodeDecodeError as error:
            line = 1 + text.count(b"\n", 0, error.start)
            value = f"not UTF-8: byte 0x{text[error.start]:02x} in line {line}"
            hint = "The Hub reads UTF-8. Save it as that. If it is Latin-1: iconv -f latin1 -t utf-8 README.md > new.md"
            raise ModelError(CARD, value, hint) from None
    sentences = [f"{CARD}: changed since the export"] if edited else []
    return [*sentences, f"{', '.join(map(shown, extra))}: not listed in {RECORD}"] if extra else sentences


def _check_entry(name: str, expected: Any) -> None:
    """Raise ModelError if a name could point outside the folder, or its entry lacks a size or sha256."""
    path = PurePosixPath(name)
    is_plain = name.isprintable() and "\\" not in name and path.as_posix() == name and ".." not in path.parts
    if not is_plain or not path.parts or path.is_absolute():
        raise ModelError(shown(name), "missing", f"{RECORD} lists it, but the path is not inside the folder. {AGAIN}")
    size, digest = (expected.get("size"), expected.get("sha256")) if isinstance(expected, Mapping) else (None, None)
    if type(size) is not int or size < 0:
        raise ModelError(RECORD, f"files: {name}: size {str(size)[:40]!r}", f"Expected a number of bytes. {AGAIN}")
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        value = f"files: {name}: sha256 {str(digest)[:40]!r}"
        raise ModelError(RECORD, value, f"Expected 64 hexadecimal digits. {AGAIN}")


def shown(name: str) -> str:
    """Return a file name for an error message, quoted if it has unprintable characters such as newlines."""
    return name if name.isprintable() else repr(name)
