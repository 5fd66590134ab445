"""Load recipes from YAML with overrides, and validate them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from surgery.errors import RecipeError, SurgeryError
from surgery.files.secret_scan import refuse_tokens
from surgery.files.shipped import close_names, shipped_recipe
from surgery.recipe.analysis import ARM_NAME, AnalysisRecipe
from surgery.recipe.export import SHARD_SIZE
from surgery.recipe.hints import example_at, meant, null_at
from surgery.recipe.pretrain import PretrainRecipe
from surgery.recipe.run import RECIPE_NAME, Recipe
from surgery.recipe.train import STAGE_NAME, Train
from surgery.recipe.yaml import read_mapping
from surgery.registry import load_plugins

AnyRecipe = Recipe | PretrainRecipe | AnalysisRecipe
R = TypeVar("R", Recipe, PretrainRecipe, AnalysisRecipe, Train)


def load_recipe(path: str | Path, overrides: Sequence[str] = (), kind: type[R] = Recipe) -> R:  # type: ignore[assignment]
    """Load a recipe, import its `plugins`, apply overrides and validate it.

    Args:
        path: YAML file, or the name of a shipped recipe.
        overrides: `key.path=value` strings, with values in YAML.
        kind: class of the recipe: `Recipe`, `PretrainRecipe` or `AnalysisRecipe`.

    Raises:
        RecipeError: the file is missing or not YAML, or a key is unknown, duplicate or has an invalid value.
    """
    return _loaded(path, overrides, kind)


def load_any(path: str | Path, overrides: Sequence[str] = ()) -> AnyRecipe:
    """Load any kind of recipe.

    The kind follows from the keys: `changes` or `sweeps` make an `AnalysisRecipe`, a section `model` without `base`
    makes a `PretrainRecipe`, and all others a `Recipe`.

    Args:
        path: YAML file, or the name of a shipped recipe.
        overrides: as in `load_recipe`.
    """
    return _loaded(path, overrides)


def _loaded(path: str | Path, overrides: Sequence[str], kind: type[Any] | None = None) -> Any:
    data = read_mapping(find_recipe(path), overrides)
    found = _kind_of(data)
    if kind not in (None, found):
        command = _COMMANDS[found]
        hint = f"It is a recipe of `surgery {command}`, not of `surgery {_COMMANDS[kind]}`: surgery {command} {path}"
        raise RecipeError("recipe", str(path), hint)
    refuse_tokens(data)  # before the error of a plugin could repeat one
    load_plugins(plugin_modules(data))
    return check_recipe(data, found)  # type: ignore[type-var]


def plugin_modules(data: dict[str, Any]) -> list[str]:
    """List the modules under `plugins` of a recipe. Validation reports names that are no modules."""
    listed = data.get("plugins")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    return [name for name in names if all(part.isidentifier() for part in name.split("."))]


def shipped(name: str) -> Path:
    """Find a recipe that is installed with the package, or in `recipes/` of a checkout.

    Raises:
        RecipeError: there is no such recipe.
    """
    path = shipped_recipe(name)
    if path is None:
        raise RecipeError("recipe", name, "The installation is incomplete. Install ssm-surgery again.")
    return path


def find_recipe(recipe: str | Path) -> Path:
    """Return the path of a recipe: the file of this name, otherwise the shipped recipe of this name.

    Raises:
        RecipeError: there is neither.
    """
    path = Path(recipe)
    if path.is_file():
        return path
    found = shipped_recipe(str(path))
    if found is None:
        raise no_recipe(str(recipe))
    return found


def no_recipe(name: str) -> RecipeError:
    """Return the error for a name that is neither a file nor a shipped recipe."""
    close = close_names(name)
    meant = f" Did you mean {' or '.join(close)}?" if close else ""
    there = "It is a folder" if name and Path(name).is_dir() else "The file does not exist"
    hint = f"{there}, and no shipped recipe has this name.{meant} `surgery recipes` lists them."
    return RecipeError("recipe", name, hint)


_MOST = 120  # characters of a value in an error
_NO_KEYS = ("[key]", "mamba2", "llama")  # pydantic names the keys of a mapping so, and the kinds of `model`
# Patterns of names in words.
_ALLOWED = {
    RECIPE_NAME: "Use letters, digits, dots, hyphens and underscores, at most 200, and begin with a letter or a digit",
    STAGE_NAME: "Use lower-case letters, digits, hyphens and underscores, at most 100",
    ARM_NAME: "Use lower-case letters, digits and underscores, at most 100, and begin with a letter or a digit",
    SHARD_SIZE: "Use a number and a unit without a space, such as 5GB",
}
# Patterns in pydantic's messages, and the words of a recipe for them.
_WORDINGS = {
    "^Value error, ": "",
    "^Field required$": "This key is required",
    "^(Input|Tuple|List) should": "It must",
    "a valid dictionary or instance of .*": "a section with keys",
    "a valid (tuple|list)": "a list",
    "a valid dictionary": "a section with keys",
    " after validation": "",
    r"Input tag .* does not match any of the expected tags: (.*)": r"The key `kind` must be one of \1",
}
_TAKES_EXAMPLE = ("tuple_type", "list_type", "dict_type", "model_type", "model_attributes_type")
_COMMANDS: dict[Any, str] = {Recipe: "run", PretrainRecipe: "pretrain", AnalysisRecipe: "analyse"}


def _kind_of(data: Mapping[str, Any]) -> type[Recipe] | type[PretrainRecipe] | type[AnalysisRecipe]:
    """Kind of a recipe, from its keys."""
    if "changes" in data or "sweeps" in data:
        return AnalysisRecipe
    return PretrainRecipe if isinstance(data.get("model"), Mapping) and "base" not in data else Recipe


def check_recipe(data: dict[str, Any], kind: type[R] = Recipe) -> R:  # type: ignore[assignment]
    """Validate a recipe, or its section `train`, given as plain data (dicts, lists and scalars).

    Raises:
        RecipeError: a key or value is invalid, or a value holds an access token. Further errors are listed by key.
    """
    refuse_tokens(data)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        faults = _in_order(error.errors(include_url=False))
        first = faults[0]
        where = ".".join(str(p) for p in first["loc"] if p not in _NO_KEYS) or "recipe"
        wrong = first["input"]
        if not first["loc"] and isinstance(wrong, dict) and "name" in wrong:
            wrong = wrong["name"]  # sections that do not fit together: the whole recipe would be its value
        value: str | None = "missing" if first["type"] == "missing" else repr(wrong)[:_MOST]
        if isinstance(wrong, dict) and len(repr(wrong)) > _MOST:
            value = None  # a section whose keys do not fit together: the message names them
        cause = first.get("ctx", {}).get("error")
        hint = cause.hint if isinstance(cause, SurgeryError) and cause.value == repr(wrong) else first["msg"]
        for pattern, words in _WORDINGS.items():
            hint = re.sub(pattern, words, hint, count=1)
        if first["type"] == "string_pattern_mismatch":
            pattern = first["ctx"]["pattern"]
            hint = _ALLOWED.get(pattern, f"It must match {pattern}")
        if "extra" in first["type"]:
            hint = f"Unknown key.{meant(kind, first['loc'])} `surgery schema` lists all keys."
        if first["type"] in _TAKES_EXAMPLE:
            hint += example_at(kind, first["loc"], wrong)
        if first["type"].startswith(("greater_than", "less_than", "int_", "float_")):
            hint += null_at(kind, first["loc"])
        more = f" ({len(faults) - 1} more: {', '.join('.'.join(map(str, f['loc'])) for f in faults[1:6])})"
        raise RecipeError(where, value, hint + (more if len(faults) > 1 else "")) from None


def _in_order(faults: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Order faults so that the cause comes first: unknown keys, wrong values, missing keys.

    Drops the faults of a list or section that follow from a fault inside it.
    """
    places = {fault["loc"][:depth] for fault in faults for depth in range(len(fault["loc"]))}
    causes = [fault for fault in faults if fault["loc"] not in places]
    return sorted(causes, key=lambda fault: ("missing" in fault["type"]) - ("extra" in fault["type"]))


def to_yaml(recipe: AnyRecipe, defaults: bool = True) -> str:
    """Return a recipe as YAML, with all defaults or with none."""
    return yaml.safe_dump(
        recipe.model_dump(mode="json", exclude_defaults=not defaults), sort_keys=False, allow_unicode=True, width=110
    )
