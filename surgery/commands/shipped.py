"""Commands that check recipes, and print and copy shipped files: `surgery validate`, `recipes` and `examples`."""

from __future__ import annotations

import os
import sys
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from surgery.commands.arguments import Overrides, RecipePath
from surgery.errors import RecipeError, SurgeryError
from surgery.files.shipped import recipe_names, shipped_root
from surgery.recipe import AnalysisRecipe, Recipe, load_any, to_yaml
from surgery.recipe.loading import no_recipe, shipped


def validate(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Check a recipe, its base, heads and data without loading weights, and print it with all defaults."""
    loaded = load_any(recipe, overrides or ())
    skipped: list[str] = []
    if isinstance(loaded, Recipe):
        from surgery.run.without_weights import check_installed, check_without_weights

        check_installed(loaded)
        skipped = check_without_weights(loaded, recipe)
        for text in loaded.notes:
            print(f"note: {text}", file=sys.stderr)
    elif isinstance(loaded, AnalysisRecipe):
        from surgery.run.analysis import check_without_weights as check_analysis

        skipped = check_analysis(loaded)
    for text in skipped:
        print(f"not checked: {text}", file=sys.stderr)
    print(to_yaml(loaded), end="")


recipes = typer.Typer(rich_markup_mode=None, help="List the shipped recipes, or print one with `show`.")


@recipes.callback(invoke_without_command=True)
def list_recipes(context: typer.Context) -> None:
    """List the shipped recipes, or print one with `show`."""
    if context.invoked_subcommand is None:
        names = recipe_names()
        for name in names:
            lines = shipped(name).read_text(encoding="utf-8").splitlines()
            comment = next((line.lstrip("# ") for line in lines if line.startswith("#")), "")
            print(f"{name:{max(map(len, names))}}  {comment}")


@recipes.command("show")
def show(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A name that `surgery recipes` lists, or accelerate/fsdp2.")
    ],
) -> None:
    """Print a shipped recipe with its comments, to redirect into a file of your own."""
    if ".." in PurePosixPath(name).parts or name.startswith("/"):
        raise no_recipe(name)
    root = shipped_root() / "recipes"
    for path in (root / f"{name}.yaml", root / name):
        if path.is_file():
            print(path.read_text(encoding="utf-8"), end="")
            return
    raise no_recipe(name)


def examples(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Folder to write.")] = Path("examples"),
) -> None:
    """Copy the generators of example data into FOLDER. Replaces no file."""
    sources = sorted((shipped_root() / "examples").glob("*.py"))
    if not sources:
        raise RecipeError("examples", str(shipped_root()), "The installation is incomplete. Install ssm-surgery again.")
    if folder.exists() and not folder.is_dir():
        raise SurgeryError("FOLDER", str(folder), "It is a file. Set another folder.")
    for source in sources:
        if os.path.lexists(folder / source.name):
            raise SurgeryError("FOLDER", str(folder / source.name), "The file exists. Set another folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source in sources:
            with open(folder / source.name, "xb") as file:  # follows no link
                file.write(source.read_bytes())
            print(f"wrote {folder / source.name}")
    except OSError as error:
        raise SurgeryError("FOLDER", str(folder), f"{error.strerror}. Set another folder.") from error
