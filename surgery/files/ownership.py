"""Mark the folders this toolkit writes, and refuse to replace any other."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from surgery import __version__
from surgery.errors import RunError
from surgery.files.atomic import read_mapping, text_or_empty, write_json

Kind = Literal["run", "analysis", "comparison", "model", "export"]


MARK = ".surgery.json"


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
    record = read_mapping(folder / "export.json")
    if "checked_without_surgery" in record or {"format", "versions", "files"} <= record.keys():
        return "export"
    if (folder / "recipe.yaml").is_file() and (folder / ".stages").is_dir():
        return "run"
    if (folder / "recipe.yaml").is_file() and (folder / "arms").is_dir():
        return "analysis"
    entries = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    if entries <= {"results.json", "figures"} and "revisions" in read_mapping(folder / "results.json"):
        return "comparison"
    pretrained = {"README.md", "scores.json"} <= entries and "Made with `surgery pretrain`" in text_or_empty(
        folder / "README.md"
    )
    return "model" if pretrained else None


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
