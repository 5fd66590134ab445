"""Load a recipe from YAML with overrides, and validate it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from surgery.errors import RecipeError
from surgery.files.secret_scan import refuse_tokens
from surgery.recipe.analysis import AnalysisRecipe
from surgery.recipe.pretrain import PretrainRecipe
from surgery.recipe.run import Recipe
from surgery.recipe.yaml import read_mapping
from surgery.registry import load_plugins

R = TypeVar("R", Recipe, PretrainRecipe, AnalysisRecipe)


def load_recipe(path: str | Path, overrides: Sequence[str] = (), kind: type[R] = Recipe) -> R:  # type: ignore[assignment]
    """Reads a recipe and applies `key.path=value` overrides, whose values are YAML themselves.

    Raises:
        RecipeError: no such file, not YAML, duplicate or unknown key, wrong type, bad value; names the key.
    """
    data = read_mapping(Path(path), overrides)
    load_plugins(_modules(data))
    return check_recipe(data, kind)


def _modules(data: dict[str, Any]) -> list[str]:
    """The modules that a recipe lists under `plugins`. Validation refuses other names."""
    listed = data.get("plugins")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    return [name for name in names if all(part.isidentifier() for part in name.split("."))]


def shipped(name: str) -> Path:
    """The file of a recipe that a command runs by itself: in the installed package, or in `recipes/` of a checkout.

    Raises:
        RecipeError: it is in neither place.
    """
    package = Path(__file__).parents[1]
    for folder in (package / "recipes", package.parent / "recipes"):
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    raise RecipeError("recipe", name, "The installation lacks it. Install ssm-surgery again.")


AnyRecipe = Recipe | PretrainRecipe | AnalysisRecipe


def load_any(path: Path, overrides: Sequence[str] = ()) -> AnyRecipe:
    """Reads whichever kind of recipe a file holds.

    One that makes a model from nothing has no `base`; one that analyses a model has `changes` or `sweeps`. What cannot
    be read is taken for a Recipe, whose loading says what is wrong.
    """
    try:
        data = read_mapping(path)
    except RecipeError:
        data = {}
    if "changes" in data or "sweeps" in data:
        return load_recipe(path, overrides, AnalysisRecipe)
    if "model" in data and "base" not in data:
        return load_recipe(path, overrides, PretrainRecipe)
    return load_recipe(path, overrides)


def check_recipe(data: dict[str, Any], kind: type[R] = Recipe) -> R:  # type: ignore[assignment]
    """Validates plain data. Raises RecipeError with one line for each fault, or where a value holds a token."""
    refuse_tokens(data)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        first = faults[0]
        where = ".".join(str(p) for p in first["loc"]) or "recipe"
        found = "missing" if first["type"] == "missing" else repr(first["input"])[:120]
        hint = "This key is not known here; `surgery schema` lists them." if "extra" in first["type"] else first["msg"]
        more = f" ({len(faults) - 1} more: {', '.join('.'.join(map(str, f['loc'])) for f in faults[1:6])})"
        raise RecipeError(where, found, hint + (more if len(faults) > 1 else "")) from None


def to_yaml(recipe: AnyRecipe) -> str:
    """The recipe in full, defaults included."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)
