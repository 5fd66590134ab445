"""The command `surgery validate`."""

from __future__ import annotations

import sys

from surgery.commands.arguments import Overrides, RecipePath
from surgery.recipe import AnalysisRecipe, Recipe, load_any, to_yaml


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
