"""Run folders. Owns: atomic writes, hashes, manifests and freshness. Must never know: torch, what a stage does.

A file or folder is written beside its place and renamed into it, so that it is whole or absent. A stage's manifest
is written last: if it is there and matches, the stage's outputs are.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from surgery.errors import RunError


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
    finally:
        beside.unlink(missing_ok=True)


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
    """Yields a folder beside `path` to fill; on success it replaces `path`, on failure nothing is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    try:
        yield beside
        if path.exists():
            old = path.with_name(f".{path.name}.{os.getpid()}.old")
            os.rename(path, old)
            os.rename(beside, path)
            shutil.rmtree(old)
        else:
            os.rename(beside, path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


_LEFT_OVER = re.compile(r"\.(.+)\.\d+\.(tmp|old)")  # what `write_text` and `new_folder` call their own


def sweep(folder: Path) -> None:
    """Removes what a killed process left half-written; brings back a folder that was being replaced."""
    for entry in list(folder.iterdir()):
        match = _LEFT_OVER.fullmatch(entry.name)
        if match is None:
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


class RunDir:
    """The folder of one run: `runs/NAME/`, with `recipe.yaml` and one manifest a stage under `.stages/`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def claim(self, recipe_yaml: str, overwrite: bool = False) -> None:
        """Takes the folder for this recipe.

        Raises:
            RunError: the folder holds something else, or a run of another recipe, and `overwrite` is not set.
        """
        stored = self.path / "recipe.yaml"
        if self.path.exists() and not self.path.is_dir():
            raise RunError("run folder", str(self.path), "It is a file; name the run otherwise.")
        # A claim that was killed leaves nothing but its half-written recipe.
        if self.path.exists() and not all(p.match(".recipe.yaml.*.tmp") for p in self.path.iterdir()):
            mine = stored.is_file() and _base_of(stored.read_text(encoding="utf-8")) == _base_of(recipe_yaml)
            if not mine and not overwrite:
                hint = "It belongs to another recipe or run. Give --overwrite, or another `name`."
                raise RunError("run folder", str(self.path), hint)
            if not mine:
                shutil.rmtree(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        sweep(self.path)
        for folder in [p for p in self.path.iterdir() if p.is_dir()]:
            sweep(folder)
        write_text(stored, recipe_yaml)

    def manifest(self, stage: str) -> Mapping[str, Any] | None:
        """What the stage wrote last, or None."""
        path = self.path / ".stages" / f"{stage}.json"
        return read_json(path) if path.is_file() else None

    def is_fresh(self, stage: str, key: str, outputs: Sequence[Path]) -> bool:
        """True when the stage finished with this key and its outputs are as it left them."""
        manifest = self.manifest(stage)
        return (
            self.is_finished(stage, key, outputs) and manifest is not None and manifest["outputs"] == digest(*outputs)
        )

    def is_finished(self, stage: str, key: str, outputs: Sequence[Path]) -> bool:
        """True when the stage finished with this key and its outputs are there; they may have been edited since."""
        manifest = self.manifest(stage)
        return manifest is not None and manifest["key"] == key and all(p.exists() for p in outputs)

    def finish(self, stage: str, key: str, outputs: Sequence[Path], seconds: float) -> None:
        """Writes the stage's manifest: from now on it is fresh."""
        data = {"key": key, "outputs": digest(*outputs), "seconds": round(seconds, 2)}
        write_json(self.path / ".stages" / f"{stage}.json", data)

    def forget(self, stage: str) -> None:
        """The stage will run again."""
        (self.path / ".stages" / f"{stage}.json").unlink(missing_ok=True)


def _base_of(recipe_yaml: str) -> str:
    """The lines that make two recipes the same operation: name, seed and base; sections may change and rerun."""
    lines = recipe_yaml.splitlines()
    head = lines[: next((i for i, line in enumerate(lines) if line.startswith("locate:")), len(lines))]
    return "\n".join(head)
