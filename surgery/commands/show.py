"""The command `surgery show`: print what a finished run printed at its end."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from surgery.commands.arguments import Runs
from surgery.commands.tables import print_analysis, print_comparison, print_heads, print_results, print_sweep
from surgery.errors import RecipeError, RunError, reading
from surgery.files.atomic import read_json
from surgery.files.ownership import kind_of
from surgery.files.shipped import close_models, local_path, shipped_root
from surgery.recipe import Recipe, check_recipe, load_recipe
from surgery.recipe.loading import plugin_modules
from surgery.registry import load_plugins

_FILES = {"sweep": "sweep.json", "analysis": "analysis.json"}  # by kind of folder; others have results.json
_RESULTS = ("results.json", *_FILES.values(), "heads.json")  # a folder with one of these can be shown


def _complete(context: typer.Context) -> list[str]:
    """Names of the runs, for the completion of a shell."""
    return _names(Path(context.params.get("runs") or "runs"))


def show(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run, or a folder.", autocompletion=_complete)],
    runs: Runs = Path("runs"),
) -> None:
    """Print the tables of a finished run, sweep, comparison or analysis again."""
    folder = _folder(run, runs)
    kind = kind_of(folder) or ""
    file = folder / _FILES.get(kind, "results.json")
    if not file.is_file():
        file = folder / "heads.json"
    printers = {"sweep": print_sweep, "comparison": print_comparison, "analysis": print_analysis}
    hint = "It has not the form of this version's results. Run the stage that writes it."
    with reading(str(file), None, hint, RunError):
        if kind in printers:
            printers[kind](read_json(file), folder)
        elif file.name != "heads.json":
            print_results(folder, _recipe_of(folder))
        else:
            print_heads(folder)


def _recipe_of(folder: Path) -> Recipe:
    """Read the recipe that the results were made with.

    `results.json` of a run has it, since `recipe.yaml` may be newer: a later run may have ended before its evaluation.
    Exports and results of earlier versions have it in `recipe.yaml` alone.
    """
    stored = read_json(folder / "results.json").get("recipe")
    if stored is None:
        own = folder / "recipe.yaml"  # the shipped example has one in its export alone
        return load_recipe(own if own.is_file() else folder / "export" / own.name)
    load_plugins(plugin_modules(stored))
    try:
        return check_recipe(stored)
    except RecipeError as error:
        value = f"recipe {error.field}: {error.value}"
        hint = "Another version wrote these results. Run the stage evaluate again."
        raise RunError(str(folder / "results.json"), value, hint) from error


def _folder(run: str, runs: Path) -> Path:
    """Find the folder of a run by its name or path. Raises RunError if there is none, or nothing in it to show."""
    folder = next((path for path in (Path(run), runs / run, Path(local_path(run))) if path.is_dir()), None)
    if folder is None:
        examples = [name for name in close_models(run) if (shipped_root() / name / "results.json").is_file()]
        close = get_close_matches(run, _names(runs), 2) or examples
        meant = f" Did you mean {' or '.join(close)}?" if close else ""
        raise RunError("RUN", run, f"There is no such folder here or in {runs}.{meant}")
    if not any((folder / name).is_file() for name in _RESULTS):
        raise RunError("RUN", run, f"{folder} has no results yet. Run the command that writes it to its end.")
    return folder


def _names(runs: Path) -> list[str]:
    """Names of the folders in `runs` that can be shown."""
    if not runs.is_dir():
        return []
    return sorted(path.name for path in runs.iterdir() if any((path / name).is_file() for name in _RESULTS))
