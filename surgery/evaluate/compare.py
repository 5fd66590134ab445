"""Any checkpoints side by side, on the same prompts. Owns: `surgery compare`, its part of the schema, its folder.

Must never know: how a model was made. The first model is what the others are held against.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.evaluate.contrasts import contrasts
from surgery.evaluate.efficiency import efficiency
from surgery.evaluate.evaluation import Arm, evaluate_model
from surgery.evaluate.prompts import make_prompts
from surgery.files.atomic import new_folder, write_json
from surgery.files.lock import hold
from surgery.files.ownership import check_replaceable, mark
from surgery.models.loading import (
    check_finite,
    check_vocabulary,
    load_config,
    load_model,
    load_tokenizer,
    revision_of,
)
from surgery.recipe import Base, Evaluate, check_recipe
from surgery.recipe.public import public_name
from surgery.recipe.section import Section, Seed
from surgery.recipe.yaml import apply
from surgery.report.figures.costs import costs_by_length
from surgery.report.figures.curves import accuracy_by_pairs

Tick = Callable[[int, int, str], None]


class Comparison(Section):
    """What `surgery compare` does."""

    name: str = Field(
        "compare", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$", description="Names the folder, runs/NAME."
    )
    seed: Seed = 0
    models: tuple[str, ...] = Field(min_length=1, description="Checkpoint folders, or ids on the Hub.")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = Field("float32", description="Of the weights in memory.")
    trust_remote_code: bool = Field(False, description="Run code that the checkpoints bring along.")
    evaluate: Evaluate = Evaluate(examples=200, sentences=200)

    @model_validator(mode="after")
    def _once(self) -> Comparison:
        if len(set(self.models)) < len(self.models):
            raise ValueError("the same model is named twice")
        return self


def load_comparison(models: Sequence[str], overrides: Sequence[str] = ()) -> Comparison:
    """These models, and changes such as `evaluate.examples=50`. Raises RecipeError as `load_recipe` does."""
    data = Comparison(models=("",)).model_dump(mode="json")
    for override in overrides:
        apply(data, override)
    return check_recipe({**data, "models": list(models)}, Comparison)  # type: ignore[type-var]


def compare_models(recipe: Comparison, folder: Path, progress: Tick | None = None) -> dict[str, Any]:
    """Asks every model the same prompts; writes `results.json` and figures into `folder`, whole, and returns all.

    Models of one tokenizer answer the same tokens, and are tested against the first prompt by prompt. One of another
    tokenizer is asked the same documents where their length is not counted in tokens, and is not tested.

    Args:
        folder: new, empty, or of an earlier comparison, which is replaced.
        progress: called with (done, all, model) after each task.

    Returns:
        As `results.json` of a run: `arms`, `comparisons`, `skipped`, `efficiency`, `seconds`; `models` and
        `revisions` by arm.

    Raises:
        RunError: the folder holds something else, or another process writes into it.
        SurgeryError: what loading and scoring raise.
    """
    with hold(folder):
        inputs = {f"models.{i}": model for i, model in enumerate(recipe.models)}
        check_replaceable("folder", folder, "comparison", inputs, "Set another name, such as name=my-comparison.")
        return _compare(recipe, folder, progress)


def _compare(recipe: Comparison, folder: Path, progress: Tick | None) -> dict[str, Any]:
    began = time.perf_counter()
    given = {name: _base(model, recipe) for name, model in zip(_names(recipe.models), recipe.models, strict=True)}
    tokenizers = {name: load_tokenizer(base) for name, base in given.items()}
    for name, base in given.items():  # before the first is scored
        check_vocabulary(tokenizers[name], load_config(base), base.model)
        check_finite(base)
    first = next(iter(given))
    prompts = make_prompts(recipe.evaluate, recipe.seed, tokenizer=tokenizers[first])
    arms: dict[str, Arm] = {}
    models: dict[str, PreTrainedModel] = {}
    skipped = {}
    for index, (name, base) in enumerate(given.items()):
        own = prompts
        if not _same(tokenizers[name], tokenizers[first]):
            skipped[name] = f"not tested against {first}: its tokenizer is another"
            own = make_prompts(recipe.evaluate, recipe.seed, tokenizer=tokenizers[name])

        def tick(done: int, total: int, name: str = name, index: int = index) -> None:
            if progress is not None:
                progress(index * total + done, len(given) * total, name)

        models[name] = load_model(base)
        arms[name] = evaluate_model(models[name], tokenizers[name], recipe.evaluate, recipe.seed, own, tick)
        if recipe.evaluate.efficiency is None:
            del models[name]
    results: dict[str, Any] = {
        "arms": {name: arm.summary for name, arm in arms.items()},
        "comparisons": _tests(arms, first, skipped, recipe.seed),
        "skipped": skipped,
        "models": {name: public_name(base.model) for name, base in given.items()},
        "revisions": {name: revision_of(base) for name, base in given.items()},
        "seed": recipe.seed,
    }
    with new_folder(folder) as new:
        _draw(results, models, recipe, new / "figures")
        mark(new, "comparison")
        write_json(new / "results.json", {**results, "seconds": round(time.perf_counter() - began, 2)})
    return results


def _base(model: str, recipe: Comparison) -> Base:
    return Base(model=model, dtype=recipe.dtype, trust_remote_code=recipe.trust_remote_code)


def _names(models: Sequence[str]) -> list[str]:
    """Short names, each once: what the card would call them, with a number where that says nothing."""
    names = [public_name(model) for model in models]
    return [name if names.count(name) == 1 else f"{name} ({1 + names[:i].count(name)})" for i, name in enumerate(names)]


def _same(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    return bool(one.get_vocab() == other.get_vocab())


def _tests(arms: Mapping[str, Arm], first: str, skipped: Mapping[str, str], seed: int) -> dict[str, Any]:
    """Every model of the first one's tokenizer against it."""
    alike = {name: arm for name, arm in arms.items() if name not in skipped}
    flags = {name: {task: np.asarray(x, bool) for task, x in arm.correct.items()} for name, arm in alike.items()}
    return contrasts(flags, [(name, first) for name in flags if name != first], seed)


def _draw(results: dict[str, Any], models: Mapping[str, PreTrainedModel], recipe: Comparison, folder: Path) -> None:
    """Figures; time and memory too, where they are asked for."""
    kv = {name: summary["kv_retrieval"] for name, summary in results["arms"].items()}
    if all(kv.values()):
        accuracy_by_pairs(kv, folder)
    if recipe.evaluate.efficiency is not None:
        results["efficiency"] = efficiency(models, recipe.evaluate.efficiency)
        costs_by_length(results["efficiency"]["arms"], folder, results["efficiency"]["where"])


__all__ = ["Comparison", "compare_models", "load_comparison"]
