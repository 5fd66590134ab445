"""Find the files that ship with the package: recipes, configs, data generators and small checkpoints.

A wheel holds them in `surgery/shipped/`; a checkout and an editable install read them from the root of the repository.
`setup.py` runs this file by its path, so it imports only the standard library.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path, PurePosixPath

# Files and folders, relative to the root of the repository. MANIFEST.in lists them too.
PARTS = (
    "recipes",
    "examples/*.py",
    "checkpoints/pico-far",
    "checkpoints/quickstart/heads.json",
    "checkpoints/quickstart/export",
)
FOLDER = "shipped"  # in the package, if it was installed from a wheel


def shipped_root() -> Path:
    """Return the folder that holds the shipped files: `shipped/` in an installed package, or a checkout's root."""
    package = Path(__file__).parents[1]
    return package / FOLDER if (package / FOLDER).is_dir() else package.parent


def shipped_files(root: Path) -> Iterator[str]:
    """List the files to ship, as POSIX paths relative to `root`. Skips hidden files and bytecode."""
    for part in PARTS:
        for path in sorted(root.glob(part)):
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                inner = file.relative_to(root)
                if file.is_file() and not any(p.startswith(".") or p == "__pycache__" for p in inner.parts):
                    yield inner.as_posix()


def local_path(name: str) -> str:
    """Find a file or folder that is named by a relative path.

    Args:
        name: a path or a Hub id, such as `checkpoints/pico-far`.

    Returns:
        The path of the shipped file, if `name` names one and the current folder has nothing of this name. Otherwise
        `name`, with `~` expanded.
    """
    name = os.path.expanduser(name)
    parts = PurePosixPath(name).parts
    if not name or os.path.lexists(name) or os.path.isabs(name) or ".." in parts:
        return name
    inner = PurePosixPath(*parts)
    if not any(PurePosixPath(part) in (inner, *inner.parents) for part in PARTS):
        return name
    there = shipped_root() / inner
    return str(there) if there.exists() else name


def close_models(name: str) -> list[str]:
    """Return the paths of shipped models whose last parts resemble `name`, or that lie in a folder of this name."""
    given = PurePosixPath(name).parts
    models = [part for part in PARTS if (shipped_root() / part / "config.json").is_file()]

    def is_close(model: str) -> bool:
        path = PurePosixPath(model)
        pairs = zip(reversed(given), reversed(path.parts), strict=False)
        is_inside = name in path.parts or PurePosixPath(name) in path.parents
        return is_inside or all(get_close_matches(one, [other], cutoff=0.75) for one, other in pairs)

    return [model for model in models if given and is_close(model)]


def recipe_names() -> list[str]:
    """List the names of the shipped recipes: `quickstart` stands for `recipes/quickstart.yaml`."""
    return sorted(path.stem for path in (shipped_root() / "recipes").glob("*.yaml"))


def shipped_recipe(name: str) -> Path | None:
    """Return the path of a shipped recipe, or None if there is none of this name."""
    return shipped_root() / "recipes" / f"{name}.yaml" if name in recipe_names() else None


def close_names(name: str) -> list[str]:
    """Return up to three names of shipped recipes that resemble `name`, or the name of its file."""
    wanted, names = PurePosixPath(name).name.removesuffix(".yaml").removesuffix(".yml"), recipe_names()
    similar = get_close_matches(wanted, names, 3)
    containing = [known for known in names if len(wanted) > 2 and wanted in known and known not in similar]
    return [*similar, *containing][:3]
