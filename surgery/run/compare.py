"""`surgery compare`: evaluate any checkpoints on the same prompts, and test them against the first."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator
from transformers import PreTrainedModel

from surgery.data.offsets import encode_alike
from surgery.errors import RecipeError
from surgery.evaluate.contrasts import contrasts
from surgery.evaluate.efficiency import efficiency
from surgery.evaluate.evaluation import Arm, evaluate_model
from surgery.evaluate.lm_eval import check_tasks
from surgery.evaluate.prompts import make_prompts
from surgery.files.atomic import new_folder, write_json
from surgery.files.lock import hold
from surgery.files.ownership import check_replaceable, mark
from surgery.files.secret_scan import refuse_tokens
from surgery.models.loading import check_finite, check_vocabulary, load_config, load_model, load_tokenizer, revision_of
from surgery.models.runtime import run_device
from surgery.recipe import Base, Evaluate, check_recipe
from surgery.recipe.loading import plugin_modules
from surgery.recipe.public import public_name
from surgery.recipe.section import Plugins, Section, Seed
from surgery.recipe.yaml import apply
from surgery.registry import load_plugins
from surgery.report.progress_lines import ProgressLines
from surgery.run.context import part_of


class Comparison(Section):
    """The settings of `surgery compare`."""

    name: str = Field("compare", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")
    """The folder is runs/NAME."""
    seed: Seed = 0
    models: tuple[str, ...] = Field(min_length=1)
    """Checkpoint folders, or ids on the Hub."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    """Of the weights in memory."""
    trust_remote_code: bool = False
    """Run code that the checkpoints contain."""
    evaluate: Evaluate = Evaluate(examples=200, sentences=200)
    plugins: Plugins = ()

    @field_validator("models")
    @classmethod
    def _models_differ(cls, models: tuple[str, ...]) -> tuple[str, ...]:
        names = [model.rstrip("/") for model in models]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name} is listed twice. List each model once.")
        return models

    @field_validator("evaluate")
    @classmethod
    def _has_no_further_arms(cls, evaluate: Evaluate) -> Evaluate:
        if evaluate.read_twice:
            raise ValueError("`read_twice` adds arms to runs of `surgery run` only. Remove it.")
        return evaluate

    def bases(self) -> dict[str, Base]:
        """The models by name; equal names are numbered."""
        names = [public_name(model) for model in self.models]
        numbered = (n if names.count(n) == 1 else f"{n} ({1 + names[:i].count(n)})" for i, n in enumerate(names))
        more = {"dtype": self.dtype, "trust_remote_code": self.trust_remote_code}
        bases = (Base(model=model, **more).named("MODEL") for model in self.models)
        return dict(zip(numbered, bases, strict=True))


def load_comparison(models: Sequence[str], overrides: Sequence[str] = ()) -> Comparison:
    """Make the settings for these models, with overrides such as `evaluate.examples=50`. Raises RecipeError."""
    data = Comparison(models=("",)).model_dump(mode="json")
    for override in overrides:
        if override.partition("=")[0].partition(".")[0] == "models":
            raise RecipeError("override", repr(override)[:200], "Give the models as arguments instead.")
        apply(data, override)
    refuse_tokens(data)  # before the error of a plugin could repeat one
    load_plugins(plugin_modules(data))
    return check_recipe({**data, "models": list(models)}, Comparison)  # type: ignore[type-var]


def compare_models(recipe: Comparison, folder: Path, reporter: ProgressLines | None = None) -> dict[str, Any]:
    """Evaluate every model on the same prompts, and write `results.json` and figures into `folder`.

    Models with the same tokenizer as the first model get the same tokens, and a paired test against the first model. A
    model with another tokenizer gets the same documents, unless their length is counted in tokens. It is not tested.

    Args:
        recipe: models and tasks.
        folder: new, empty, or that of an earlier comparison, which is replaced.
        reporter: receives progress, once all models are checked.

    Returns:
        Keys as in `results.json` of a run: `arms`, `comparisons`, `skipped`, `efficiency`, `seconds`; `models` and
        `revisions` by arm; `recipe`, the settings.

    Raises:
        RunError: the folder contains something else, or another process writes into it.
        SurgeryError: a model cannot be loaded or evaluated.
    """
    with hold(folder):
        inputs = {f"models.{i}": model for i, model in enumerate(recipe.models)}
        check_replaceable("folder", folder, "comparison", inputs, "Set another name, such as name=my-comparison.")
        began = time.perf_counter()
        results, models = _evaluate(recipe, recipe.bases(), reporter or ProgressLines())
        from surgery.report.figures.costs import costs_by_length  # matplotlib is slow to import
        from surgery.report.figures.curves import accuracy_by_pairs

        with new_folder(folder) as new:
            kv = {name: summary["kv_retrieval"] for name, summary in results["arms"].items()}
            if all(kv.values()):
                accuracy_by_pairs(kv, new / "figures")
            if recipe.evaluate.efficiency is not None:
                results["efficiency"] = efficiency(models, recipe.evaluate.efficiency)
                costs_by_length(results["efficiency"]["arms"], new / "figures", results["efficiency"]["where"])
            results["seconds"] = round(time.perf_counter() - began, 2)
            write_json(new / "results.json", results)
            mark(new, "comparison")
        return results


def _evaluate(
    recipe: Comparison, bases: Mapping[str, Base], reporter: ProgressLines
) -> tuple[dict[str, Any], dict[str, PreTrainedModel]]:
    """Evaluate the models. Returns the results, and the models by name if efficiency is measured."""
    tokenizers = {name: load_tokenizer(base) for name, base in bases.items()}
    if recipe.evaluate.lm_eval is not None:  # all checks come before the first evaluation
        check_tasks(recipe.evaluate.lm_eval)
    for name, base in bases.items():
        check_vocabulary(tokenizers[name], load_config(base), base.model)
        check_finite(base)
    first = next(iter(bases))
    shared = make_prompts(recipe.evaluate, recipe.seed, tokenizer=tokenizers[first])
    prompts = {
        name: shared
        if encode_alike(other, tokenizers[first])
        else make_prompts(recipe.evaluate, recipe.seed, tokenizer=other)
        for name, other in tokenizers.items()
    }
    reporter.start("compare", "evaluating every model")
    arms: dict[str, Arm] = {}
    models: dict[str, PreTrainedModel] = {}
    for index, (name, base) in enumerate(bases.items()):
        tick = part_of(reporter, name, index, len(bases))
        model = load_model(base).to(run_device())  # type: ignore[arg-type]
        arms[name] = evaluate_model(model, tokenizers[name], recipe.evaluate, recipe.seed, prompts[name], tick)
        if recipe.evaluate.efficiency is not None:
            models[name] = model
        del model  # before the next one is loaded
    others = [name for name in bases if prompts[name] is not shared]
    paired = [name for name in bases if name not in others]
    flags = {name: {task: np.asarray(x, bool) for task, x in arms[name].correct.items()} for name in paired}
    public = {name: public_name(base.model) for name, base in bases.items()}
    results = {
        "arms": {name: arm.summary for name, arm in arms.items()},
        "comparisons": contrasts(flags, [(name, first) for name in flags if name != first], recipe.seed),
        "skipped": dict.fromkeys(others, f"not tested against {first}, since it has another tokenizer"),
        "models": public,
        "revisions": {name: revision_of(base) for name, base in bases.items()},
        "seed": recipe.seed,
        "recipe": {**recipe.model_dump(mode="json"), "models": list(public.values())},
    }
    return results, models
