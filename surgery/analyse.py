"""The paper's procedures on one model: retrieval and knowledge side by side, with parts of it gone.

Owns: the arms of an analysis and its folder. Must never know: how a part is removed (capture), how an arm is scored.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from surgery.capture import altered
from surgery.checkpoint import load_config, load_model, load_tokenizer, revision_of
from surgery.errors import RecipeError
from surgery.evaluate import Arm, compare, evaluate, make_prompts
from surgery.families import family_of
from surgery.heads import HeadId
from surgery.recipe import AnalysisRecipe, Change, to_yaml
from surgery.report.figures import accuracy_by_pairs
from surgery.rundir import new_folder, write_json, write_text


def analyse(
    recipe: AnalysisRecipe,
    folder: Path,
    overwrite: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Scores the base and each change of it on the same prompts; writes `analysis.json`, the recipe and a figure.

    Args:
        folder: written whole; must not be there without `overwrite`.
        progress: called with (done, all, arm) after each task.

    Raises:
        RecipeError: a change names a head or a layer that the model does not have, or the folder is there.
        SurgeryError: what loading and scoring raise.
    """
    if folder.exists() and not overwrite:
        raise RecipeError("folder", str(folder), "It is there already. Name another run, or give --overwrite.")
    config = load_config(recipe.base)
    for given in recipe.changes:
        check_change(given, config)
    model, tokenizer = load_model(recipe.base), load_tokenizer(recipe.base)
    specs, prompts = family_of(config).mixers(config), make_prompts(recipe.evaluate, recipe.seed)
    arms: dict[str, Arm] = {}
    every: tuple[Change | None, ...] = (None, *recipe.changes)
    for index, change in enumerate(every):
        name = "base" if change is None else change.name

        def tick(done: int, total: int, name: str = name, index: int = index) -> None:
            if progress is not None:
                progress(index * total + done, len(every) * total, name)

        arguments = (model, tokenizer, recipe.evaluate, recipe.seed, prompts, tick)
        if change is None:
            arms[name] = evaluate(*arguments)
            continue
        with altered(model, specs, _by_mixer(change), change.layers, change.mask_last_row):
            arms[name] = evaluate(*arguments)
    found = {
        "model": recipe.base.model,
        "revision": revision_of(recipe.base),
        "seed": recipe.seed,
        "changes": {change.name: change.model_dump(mode="json") for change in recipe.changes},
        "arms": {name: arm.summary for name, arm in arms.items()},
        "base_is_better": {
            c.name: compare({c.name: arms[c.name], "base": arms["base"]}, c.name) for c in recipe.changes
        },
    }
    with new_folder(folder) as new:
        write_json(new / "analysis.json", found)
        write_text(new / "recipe.yaml", to_yaml(recipe))
        accuracy_by_pairs({name: arm.summary["kv_retrieval"] for name, arm in arms.items()}, new / "figures")
    return found


def check_change(change: Change, config: PreTrainedConfig) -> None:
    """Raises RecipeError when the model has no such head, so many layers, or no attention to mask."""
    specs = {spec.name: spec for spec in family_of(config).mixers(config)}
    for name in change.disable:
        head = HeadId.parse(name)
        spec = specs.get(head.mixer)
        if spec is None or head.head >= spec.num_heads:
            names = [str(h) for s in specs.values() for h in s.heads]
            raise RecipeError(f"changes.{change.name}.disable", name, f"Heads go from {names[0]} to {names[-1]}.")
    if change.layers is not None and change.layers >= config.num_hidden_layers:
        hint = f"The model has {config.num_hidden_layers}; keep fewer."
        raise RecipeError(f"changes.{change.name}.layers", change.layers, hint)
    if change.mask_last_row and all(spec.is_ssm for spec in specs.values()):
        raise RecipeError(f"changes.{change.name}.mask_last_row", "true", "The model has no attention.")


def _by_mixer(change: Change) -> dict[str, list[int]]:
    heads: dict[str, list[int]] = {}
    for head in map(HeadId.parse, change.disable):
        heads.setdefault(head.mixer, []).append(head.head)
    return heads
