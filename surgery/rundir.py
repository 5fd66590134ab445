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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from surgery import __version__
from surgery.errors import RunError, SurgeryError
from surgery.sections import Section

Kind = Literal["run", "analysis", "comparison", "model", "export"]
MARK = ".surgery.json"
# What a run writes into its folder, besides its mark.
WRITTEN = (
    "heads.json", "heads.csv", "locate.html", "locate.json", "plan.json", "spliced",
    "splice.json", "steps", "teacher_logits", "logs", "trained", "training.json", "no_splice",
    "no_splice_training.json", "results.json", "report.html", "figures", "export", ".stages", "recipe.yaml",
)  # fmt: skip


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


def mark(folder: Path, kind: Kind) -> None:
    """Write into `folder` what it is, so that it may be replaced later."""
    write_json(folder / MARK, {"kind": kind, "version": __version__})


_CALLED: Mapping[Kind, str] = {
    "run": "run of this toolkit",
    "analysis": "analysis of this toolkit",
    "comparison": "comparison of this toolkit",
    "model": "model that this toolkit wrote",
    "export": "export of this toolkit",
}


def kind_of(folder: Path) -> Kind | None:
    """What this toolkit wrote there; None for any other folder.

    Exports have their record in the place of a mark. Folders of versions that wrote no mark are known by files that
    only this toolkit writes.
    """
    marked = read_mapping(folder / MARK).get("kind")
    for kind in _CALLED:
        if marked == kind:
            return kind
    if "checked_without_surgery" in read_mapping(folder / "export.json"):
        return "export"
    if (folder / "recipe.yaml").is_file() and (folder / ".stages").is_dir():
        return "run"
    if (folder / "recipe.yaml").is_file() and (folder / "arms").is_dir():
        return "analysis"
    entries = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    if entries <= {"results.json", "figures"} and "revisions" in read_mapping(folder / "results.json"):
        return "comparison"
    pretrained = {"README.md", "scores.json"} <= entries and "Made with `surgery pretrain`" in _text(
        folder / "README.md"
    )
    return "model" if pretrained else None


def read_mapping(path: Path) -> dict[str, Any]:
    """A file of one JSON object; empty if it is missing or is anything else."""
    try:
        data = json.loads(_text(path))
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _text(path: Path) -> str:
    """A small file's text; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


_READ = ("model", "tokenizer", "path", "heads")  # keys of a recipe that may name a file or folder


def inputs_of(recipe: Section, file: Path | None = None) -> dict[str, str]:
    """Where a recipe's models, tokenizers, heads and data are, by key; with `file`, the recipe's own."""
    found = {} if file is None else {"recipe": str(file)}

    def walk(prefix: str, data: Any) -> None:
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            if key in _READ and isinstance(value, str):
                found[f"{prefix}{key}"] = value
            elif isinstance(value, dict | list):
                walk(f"{prefix}{key}.", value)

    walk("", recipe.model_dump(mode="json"))
    return found


def check_apart(field: str, replaced: Iterable[Path], inputs: Mapping[str, str], instead: str) -> None:
    """Refuse to replace folders that hold what a command reads, or the current directory. Symlinks are followed.

    Args:
        field: that names the folders, for the error.
        inputs: files and folders by the field that names them; what is not on this disk does not count.
        instead: what would do, for the error.

    Raises:
        RunError: one of them lies there.
    """
    for folder in replaced:
        real = Path(os.path.realpath(folder))  # `resolve` raises for a link that leads to itself
        for name, given in inputs.items():
            path = os.path.expanduser(given)
            if os.path.exists(path) and Path(os.path.realpath(path)).is_relative_to(real):
                raise RunError(field, str(folder), f"{name} ({given}) is read from it. {instead}")
        if Path.cwd().is_relative_to(real):
            raise RunError(field, str(folder), f"The current folder lies in it. {instead}")


def check_replaceable(
    field: str, folder: Path, kind: Kind, inputs: Mapping[str, str], instead: str = "Name another folder."
) -> bool:
    """Refuse to replace anything but what this toolkit wrote as `kind`, or what a command reads.

    Returns:
        Whether there is something to replace.

    Raises:
        RunError: `folder` is a file, or holds something else, one of `inputs` or the current directory.
    """
    if folder.exists() and not folder.is_dir():
        raise RunError(field, str(folder), f"It is a file. {instead}")
    check_apart(field, [folder], inputs, instead)
    if not folder.is_dir() or all(entry.name == ".lock" for entry in folder.iterdir()):
        return False
    if kind_of(folder) != kind:
        raise RunError(field, str(folder), f"It holds something that is no {_CALLED[kind]}. {instead}")
    return True


def remove(folder: Path, names: Sequence[str]) -> None:
    """Remove these entries of `folder`, and its mark; anything else in it stays."""
    for path in (folder / name for name in (*names, MARK)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


class RunDir:
    """The folder of one run: `runs/NAME/`, with `recipe.yaml` and one manifest a stage under `.stages/`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self, recipe_yaml: str, overwrite: bool = False, inputs: Mapping[str, str] | None = None) -> bool:
        """Whether taking the folder for this recipe removes a run of another one. Changes nothing.

        Args:
            inputs: what the recipe reads from this disk, and its own file as `recipe`.

        Raises:
            RunError: the folder holds something else, or what the run reads; or a run of another recipe, and
                `overwrite` is not set.
        """
        instead, inputs = f"Set another name, such as name={self.path.name}-2.", inputs or {}
        stored = _text(self.path / "recipe.yaml")
        if stored and kind_of(self.path) in (None, "run") and _base_of(stored) == _base_of(recipe_yaml):
            models = {field: given for field, given in inputs.items() if field != "recipe"}
            check_apart("run folder", [self.path / name for name in WRITTEN], models, instead)
            return False
        # A claim that was killed leaves nothing but its half-written recipe.
        if self.path.is_dir() and all(p.match(".recipe.yaml.*.tmp") for p in self.path.iterdir()):
            return False
        if not check_replaceable("run folder", self.path, "run", inputs, instead):
            return False
        if not overwrite:
            hint = f"It belongs to another recipe or run. {instead} --overwrite removes that run."
            raise RunError("run folder", str(self.path), hint)
        return True

    def claim(self, recipe_yaml: str, overwrite: bool = False, inputs: Mapping[str, str] | None = None) -> None:
        """Takes the folder for this recipe. With `overwrite` a run of another one is removed.

        Raises:
            RunError: as `check`.
        """
        if self.check(recipe_yaml, overwrite, inputs):
            remove(self.path, WRITTEN)
        self.path.mkdir(parents=True, exist_ok=True)
        sweep(self.path)
        for folder in [p for p in self.path.iterdir() if p.is_dir()]:
            sweep(folder)
        write_text(self.path / "recipe.yaml", recipe_yaml)
        mark(self.path, "run")

    def manifest(self, stage: str) -> Mapping[str, Any] | None:
        """What the stage wrote last, or None. Raises RunError where the file holds something else."""
        path = self.path / ".stages" / f"{stage}.json"
        found = read_json(path) if path.is_file() else None
        if found is not None and not (isinstance(found, dict) and {"key", "outputs"} <= found.keys()):
            raise RunError(str(path), "no manifest of a stage", "Delete it: the stage runs again.")
        return found

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
