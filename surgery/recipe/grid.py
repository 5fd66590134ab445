"""Recipes that differ in a few keys: parse `KEY=VALUE,VALUE` and load one recipe for every combination of values.

This is the grid of `surgery sweep`. The ablation sweep of locating and the `sweeps` of an analysis change a model and
not its recipe.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from surgery.errors import RecipeError, SurgeryError
from surgery.files.atomic import fingerprint
from surgery.files.secret_scan import refuse_tokens
from surgery.recipe.loading import find_recipe, load_recipe
from surgery.recipe.run import Recipe
from surgery.recipe.yaml import load_yaml, read_mapping, reading_yaml

NUM_HEADS = "splice.num_heads"
SEED = "seed"
_KEYS = 2  # keys with several values, besides the seed
_EXAMPLE = "Use KEY=VALUE,VALUE, such as splice.num_heads=0,1,2."


@dataclass(frozen=True)
class GridPoint:
    """One combination of values.

    Attributes:
        values: value by key.
        recipe: recipe of the run that has its numbers. `recipe.name` is the name of the run's folder.
        arm: arm of that run. `hybrid`, or with `splice.num_heads=0` the control.
        others: recipes of other runs with the same control, for when the run diverges.
    """

    values: Mapping[str, Any]
    recipe: Recipe
    arm: Literal["hybrid", "no_splice", "base"] = "hybrid"
    others: tuple[Recipe, ...] = ()


@dataclass(frozen=True)
class Grid:
    """All points of a sweep, in the order of the values.

    Attributes:
        name: name of the recipe.
        axes: values of the keys that have several.
        points: one for each combination of values.
    """

    name: str
    axes: Mapping[str, tuple[Any, ...]]
    points: tuple[GridPoint, ...]

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """One recipe for each run. Runs with more heads come first, because others may reuse their choice of heads."""
        recipes = {point.recipe.name: point.recipe for point in self.points}
        return tuple(sorted(recipes.values(), key=lambda recipe: -(recipe.splice.num_heads if recipe.splice else 0)))


def load_grid(path: str | Path, words: Sequence[str]) -> Grid:
    """Load one recipe for each combination of values.

    A value of `splice.num_heads` of 0 is the trained control without a splice. No recipe can request it alone, so its
    point is the control of the run with the first listed number of heads.

    Args:
        path: YAML file of the recipe, or the name of a shipped recipe.
        words: `KEY=VALUE,VALUE` for a key with several values, or `KEY=VALUE`. Commas inside brackets or quotes do not
            separate values.

    Raises:
        RecipeError: no key or too many keys have several values, a key or value is listed twice, or a recipe is
            invalid. The message names the key and the value.
    """
    read_mapping(find_recipe(path))  # errors of the file itself name no value
    axes, fixed = _parsed(words)
    name = ""
    recipes: dict[str, Recipe] = {}
    combinations = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    for values in combinations:
        if _is_zero(values.get(NUM_HEADS)):
            continue
        chosen = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
        with naming(values):
            recipe = load_recipe(path, [*fixed, *chosen])
        heads = recipe.splice.heads if recipe.splice is not None else ()
        number = values.get(NUM_HEADS, len(heads))
        if heads and number != len(heads):
            hint = f"splice.heads lists {len(heads)}. Sweep another key, or splice.select without a list."
            raise RecipeError(NUM_HEADS, number, hint)
        name = recipe.name
        recipes[label_of_values(values)] = recipe.model_copy(update={"name": _name(name, values)})
    points = []
    for values in combinations:
        spliced = [values]
        if _is_zero(values.get(NUM_HEADS)):
            spliced = [{**values, NUM_HEADS: number} for number in axes[NUM_HEADS] if not _is_zero(number)]
        points.append(_point(values, [recipes[label_of_values(point)] for point in spliced]))
    return Grid(name, axes, tuple(points))


@contextmanager
def naming(values: Mapping[str, Any]) -> Iterator[None]:
    """Add the values of a point to an error that names none of their keys."""
    try:
        yield
    except SurgeryError as error:
        if error.field in values:
            raise
        raise type(error)(label_of_values(values), None, str(error)) from error


def has_seeds(keys: Collection[str]) -> bool:
    """Whether the rows of a sweep over these keys combine seeds. With no other key, each seed has a row of its own."""
    return SEED in keys and len(keys) > 1


def label_of_values(values: Mapping[str, Any]) -> str:
    """Return `key=value, key=value`."""
    return ", ".join(f"{key}={text_of(value)}" for key, value in values.items())


def text_of(value: Any) -> str:
    """Return a value as short text: strings as they are, others as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _parsed(words: Sequence[str]) -> tuple[dict[str, tuple[Any, ...]], list[str]]:
    """Separate keys with several values from overrides that hold for all runs."""
    given: dict[str, tuple[Any, ...]] = {}
    fixed: list[str] = []
    for word in words:
        key, separator, text = word.partition("=")
        if not separator or not key:
            raise RecipeError("override", repr(word), _EXAMPLE)
        if key in given:
            raise RecipeError(key, "set twice", f"Set it once. {_EXAMPLE}")
        given[key] = _values_in(key, text)
        if len(given[key]) < 2:
            fixed.append(word)
    axes = {key: values for key, values in given.items() if len(values) > 1}
    several = [key for key in axes if key != SEED]
    if not axes:
        raise RecipeError("sweep", None, f"No key has several values. {_EXAMPLE}")
    if len(several) > _KEYS:
        hint = f"At most {_KEYS} keys besides the seed can have several values. Set one of them to a single value."
        raise RecipeError("sweep", ", ".join(several), hint)
    return axes, fixed


def _values_in(key: str, text: str) -> tuple[Any, ...]:
    """Parse values separated by commas, as YAML reads them between brackets."""
    if text.strip().endswith(",") or re.search(r",\s*,", text):
        raise RecipeError(key, repr(text), f"A value is empty. {_EXAMPLE}")
    with reading_yaml(key, repr(text), "The values are not valid YAML."):
        values = load_yaml(f"[{text}]")
    if len(values) > 1 and key == "name":
        raise RecipeError("name", text, "The runs of a sweep get their own names. Set one name.")
    for number, value in enumerate(values):
        refuse_tokens(value, key)  # before an error could repeat it
        if any(_same(value, other) for other in values[:number]):
            raise RecipeError(key, text_of(value), "The value is listed twice. List it once.")
    return tuple(values)


def _same(one: Any, other: Any) -> bool:
    """True if two values are equal, such as 1 and 1.0, or have the same text."""
    return text_of(one) == text_of(other) or (isinstance(one, bool) == isinstance(other, bool) and one == other)


def _is_zero(number: Any) -> bool:
    return number == 0 and not isinstance(number, bool)


def _point(values: Mapping[str, Any], recipes: Sequence[Recipe]) -> GridPoint:
    """The point of a run; with 0 heads, that of the control of several runs with the same other values."""
    recipe, *others = recipes
    if not _is_zero(values.get(NUM_HEADS)):
        return GridPoint(values, recipe)
    if recipe.train.trains_spliced_layers:  # each control trains the layers of its own run
        others = []
    if recipe.has_control:
        return GridPoint(values, recipe, "no_splice", tuple(others))
    if recipe.train.control and recipe.state_size is not None:
        hint = "0 heads is the trained control with its state cut. There is none if only new heads train. Remove 0."
        raise RecipeError(NUM_HEADS, 0, hint)
    if recipe.train.control and recipe.splice is not None:  # only new heads train, so the base is the control
        return GridPoint(values, recipe, "base", tuple(others))
    hint = "0 heads is the trained control, and no control is trained. Set train.control=true, or remove 0."
    raise RecipeError(NUM_HEADS, 0, hint)


def _name(name: str, values: Mapping[str, Any]) -> str:
    """Name of a run and of its folder: letters, digits, dots, hyphens and underscores.

    A hash is added if characters are replaced or the name would be too long.
    """
    full = f"{name}-" + "_".join(f"{key}-{text_of(value)}" for key, value in values.items())
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", full)
    return safe if safe == full and len(safe) <= 120 else f"{safe[:110].rstrip('-')}-{fingerprint(full)[:8]}"
