"""Mark the folders that this toolkit writes, and refuse to replace others."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from surgery import __version__
from surgery.errors import RunError
from surgery.files.atomic import MARK, delete, read_mapping, write_json

Kind = Literal["run", "analysis", "comparison", "model", "export", "sweep", "checkpoints"]
_LISTED: frozenset[Kind] = frozenset({"model", "comparison"})  # kinds whose mark lists the entries of the folder


def mark(folder: Path, kind: Kind) -> None:
    """Mark `folder` as written by this toolkit, so that it can be replaced later.

    Mark a model or a comparison after its last file: the mark lists the entries that may be removed.
    """
    entries = {"entries": sorted(os.listdir(folder))} if kind in _LISTED else {}
    write_json(folder / MARK, {"kind": kind, "version": __version__, **entries})


def kind_of(folder: Path) -> Kind | None:
    """Return the kind of a folder that this toolkit wrote; None for any other folder.

    An export has no mark besides its export.json.
    """
    if not (folder / MARK).is_symlink():
        kind = read_mapping(folder / MARK).get("kind")
        if kind in get_args(Kind):
            return kind  # type: ignore[no-any-return]
    return "export" if {"format", "versions", "files"} <= read_mapping(folder / "export.json").keys() else None


def check_apart(field: str, replaced: Iterable[Path], inputs: Mapping[str, str], instead: str) -> None:
    """Refuse to replace folders that hold an input of the command or the current directory. Follows symbolic links.

    Args:
        field: recipe field or argument that names the folders.
        replaced: folders that would be replaced.
        inputs: files and folders by the field that names them. Those that do not exist are ignored.
        instead: hint of the error: what to set instead.

    Raises:
        RunError: an input or the current directory is inside.
    """
    for folder in replaced:
        real = Path(os.path.realpath(folder))  # `resolve` raises for a link that leads to itself
        for name, value in inputs.items():
            path = os.path.expanduser(value)
            if os.path.exists(path) and Path(os.path.realpath(path)).is_relative_to(real):
                raise RunError(field, str(folder), f"{name} ({value}) is inside it. {instead}")
        if Path.cwd().is_relative_to(real):
            raise RunError(field, str(folder), f"The current directory is inside it. {instead}")


def check_replaceable(
    field: str, folder: Path, kind: Kind, inputs: Mapping[str, str], instead: str = "Set another folder."
) -> bool:
    """Check that a folder is empty, or that this toolkit wrote it as `kind` and it holds no input.

    Args:
        field: recipe field or argument that names the folder.
        kind: kind of folder that may be replaced.
        inputs: as in `check_apart`.
        instead: as in `check_apart`.

    Returns:
        True if there is something to replace.

    Raises:
        RunError: `folder` is a file or a link to itself, or holds something else, one of `inputs` or the current
            directory. A model, a comparison or an export holds further entries, which would be lost.
    """
    if os.path.islink(os.path.realpath(folder)):
        raise RunError(field, str(folder), f"It is a symbolic link that leads to itself. {instead}")
    if folder.exists() and not folder.is_dir():
        raise RunError(field, str(folder), f"It is a file. {instead}")
    check_apart(field, [folder], inputs, instead)
    if not folder.is_dir() or all(entry.name == ".lock" for entry in folder.iterdir()):
        return False
    if kind_of(folder) != kind:
        raise RunError(field, str(folder), f"The folder is not empty, and holds no {kind} of this toolkit. {instead}")
    if (lost := _foreign_entry(folder, kind)) is not None:
        hint = f"It would be deleted with the folder, and this toolkit did not write it. Move it away. {instead}"
        raise RunError(field, str(folder / lost), hint)
    return True


def _foreign_entry(folder: Path, kind: Kind) -> str | None:
    """The first entry of a folder that is not listed as written by this toolkit; None if there is none or no list.

    A run, an analysis and a sweep have no list: other entries stay when they are replaced. Hidden entries are ignored:
    file managers and editors write them.
    """
    if kind == "export":
        listed = read_mapping(folder / "export.json").get("files")
        own = [*listed, "export.json"] if isinstance(listed, dict) else None
    else:
        own = read_mapping(folder / MARK).get("entries")
    if not isinstance(own, list):
        return None
    names = {str(name).partition("/")[0] for name in own}
    return next((name for name in sorted(os.listdir(folder)) if name not in names and name[0] != "."), None)


def remove(folder: Path, names: Sequence[str]) -> None:
    """Remove these entries of `folder` and its mark. Other entries stay."""
    for name in (*names, MARK):
        delete(folder / name)
