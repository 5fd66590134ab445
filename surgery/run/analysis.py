"""Evaluate one model with parts of it removed, and find its minimal model.

The procedures are those of the Gather-and-Aggregate paper (arXiv 2504.18574):

    prune                                              Figure 2
    drop_one in the minimal model                      Figure 3
    keep in two layers                                 Table 1
    a disabled head, accuracy by number of pairs       Figure 4
    swap_one                                           Figure 7
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedModel

from surgery.errors import RecipeError
from surgery.evaluate.evaluation import Arm, evaluate_model
from surgery.evaluate.prompts import make_prompts
from surgery.files.atomic import fingerprint, new_folder, read_json, write_json, write_text
from surgery.files.lock import hold
from surgery.files.ownership import check_apart, check_replaceable, kind_of, mark, remove
from surgery.models.alterations import altered
from surgery.models.loading import check_vocabulary, load_config, load_model, load_tokenizer, revision_of
from surgery.models.lookup import family_of
from surgery.models.runtime import run_device
from surgery.recipe import AnalysisRecipe, Change, as_base, to_yaml
from surgery.recipe.inputs import inputs_of
from surgery.recipe.public import is_hub_id
from surgery.report.progress_lines import ProgressLines
from surgery.run.changes import expand, off_heads, swap_plan
from surgery.run.context import part_of
from surgery.splice.graft import splice_model
from surgery.stats import holm, mcnemar, wilson

VERSION = 1  # increased when the score of an arm changes for the same inputs
LEVEL = 0.05


def analyse(
    recipe: AnalysisRecipe,
    folder: Path,
    overwrite: bool = False,
    reporter: ProgressLines | None = None,
    file: Path | None = None,
) -> dict[str, Any]:
    """Evaluate the base and each changed model on the same prompts. Writes `analysis.json`, the recipe and figures.

    Args:
        recipe: the validated recipe.
        folder: must not hold a finished analysis unless `overwrite` is set. An interrupted analysis is resumed: every
            evaluated arm is a file under `arms/`.
        overwrite: remove an earlier analysis.
        reporter: receives progress. The total grows after the sweep `prune`, which determines the other arms.
        file: the recipe's file. It must not lie in a folder that is removed.

    Returns:
        The content of `analysis.json`.

    Raises:
        RecipeError: a change names a head or a layer that the model does not have, or the folder holds another
            analysis.
        RunError: the folder holds no analysis, holds an input, or is in use by another process.
        SurgeryError: a model cannot be loaded or evaluated.
    """
    with hold(folder):
        replaced = _check_folder(recipe, folder, overwrite, file)
        config, teacher_config = _configs(recipe)
        sweeps, single = expand(recipe, config, teacher_config)
        if replaced:
            remove(folder, _WRITTEN)
        write_text(folder / "recipe.yaml", to_yaml(recipe))
        mark(folder, "analysis")
        table, pruned = _Table(recipe, folder), sweeps.get("prune", [])
        reporter = reporter or ProgressLines()
        reporter.start("analyse", "evaluating every arm")
        arms: dict[str, Arm] = {}
        _score(table, [None, *pruned], arms, reporter)
        minimal = None
        if pruned:
            minimal = minimal_model(arms, [c.name for c in pruned], config.num_hidden_layers, recipe.margin)
        sweeps, single = expand(recipe, config, teacher_config, minimal["layers"] if minimal else None)
        rest = [*single, *(c for kind, changes in sweeps.items() if kind != "prune" for c in changes)]
        _score(table, rest, arms, reporter)
        choices = table.prompts.choices
        chance = {task: [1 / len(d.questions[-1].choices) for d in documents] for task, documents in choices.items()}
        results = {
            "model": recipe.base.model,
            "revision": table.revision,
            "seed": recipe.seed,
            "changes": {c.name: c.model_dump(mode="json", exclude_defaults=True) for c in (*pruned, *rest)},
            "sweeps": {kind: [change.name for change in changes] for kind, changes in sweeps.items()},
            "minimal": minimal,
            "chance": {task: float(rows.mean()) for task, rows in _pooled(chance).items()},
            "tasks": side_by_side(arms),
            "arms": {name: arm.summary for name, arm in arms.items()},
        }
        with new_folder(folder / "figures") as figures:
            _draw(results, [change.name for change in single], figures)
        write_json(folder / "analysis.json", results)
        return results


def check_without_weights(recipe: AnalysisRecipe) -> list[str]:
    """Check the base and every change of an analysis without weights or requests. Return what was not checked."""
    models = {"base.model": recipe.base.model, "teacher.model": recipe.teacher.model if recipe.teacher else ""}
    on_the_hub = [f"{field} {model}" for field, model in models.items() if is_hub_id(model)]
    if not on_the_hub:
        expand(recipe, *_configs(recipe))
    return [f"models and changes ({model} is on the Hub)" for model in on_the_hub]


def _configs(recipe: AnalysisRecipe) -> tuple[PreTrainedConfig, PreTrainedConfig | None]:
    """Load the configs of the base, whose tokenizer must fit it, and of the teacher."""
    config = load_config(recipe.base)
    check_vocabulary(load_tokenizer(recipe.base), config)
    return config, load_config(as_base(recipe.teacher, "teacher.model")) if recipe.teacher else None


_WRITTEN = ("arms", "figures", "analysis.json", "recipe.yaml")


def _check_folder(recipe: AnalysisRecipe, folder: Path, overwrite: bool, file: Path | None) -> bool:
    """Check the folder. Returns True if an earlier analysis must be removed, False for a new or an interrupted one."""
    instead = f"Set another name, such as name={folder.name}-2."
    if overwrite:
        return check_replaceable("folder", folder, "analysis", inputs_of(recipe, file), instead)
    check_apart("folder", [folder / name for name in _WRITTEN], inputs_of(recipe), instead)
    hint = f"{instead} Or pass --overwrite to remove it." if kind_of(folder) == "analysis" else instead
    if (folder / "analysis.json").exists():
        raise RecipeError("folder", str(folder), f"The folder holds a finished analysis. {hint}")
    if folder.exists() and any(p for p in folder.iterdir() if not p.name.startswith(".")):
        # The part before `changes` (name, seed, base) must be equal. Changed arms are evaluated again.
        stored = folder / "recipe.yaml"
        same = stored.is_file() and stored.read_text(encoding="utf-8").split("\nchanges:")[0]
        if same != to_yaml(recipe).split("\nchanges:")[0]:
            raise RecipeError("folder", str(folder), f"The folder holds something else. {hint}")
    return False


class _Table:
    """Evaluate arms on the same prompts, and store each in a file. Models are loaded when needed."""

    def __init__(self, recipe: AnalysisRecipe, folder: Path) -> None:
        self.recipe, self.folder = recipe, folder / "arms"
        self.revision = revision_of(recipe.base)
        self.teacher_revision = revision_of(as_base(recipe.teacher, "teacher.model")) if recipe.teacher else ""
        self.prompts = make_prompts(recipe.evaluate, recipe.seed)
        self.device = run_device()

    @cached_property
    def model(self) -> PreTrainedModel:
        return load_model(self.recipe.base).to(self.device)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.recipe.base)

    @cached_property
    def teacher(self) -> PreTrainedModel:
        assert self.recipe.teacher is not None
        return load_model(as_base(self.recipe.teacher, "teacher.model")).to(self.device)

    def arm(self, change: Change | None, tick: Callable[[int, int], None]) -> Arm:
        """Evaluate an arm, or read its file from an interrupted analysis."""
        path = self.folder / f"{'base' if change is None else change.name}.json"
        section = self.recipe.evaluate.model_dump(mode="json")
        settings = None if change is None else change.model_dump(mode="json", exclude={"name"})
        key = fingerprint([VERSION, self.revision, self.teacher_revision, self.recipe.seed, section, settings])
        if path.is_file():
            stored = read_json(path)
            if stored["key"] == key:
                tick(1, 1)
                correct = {task: torch.tensor([x == "1" for x in row]) for task, row in stored["correct"].items()}
                return Arm(stored["summary"], correct)
        arm = self._scored(change, tick)
        correct_rows = {task: "".join(str(int(x)) for x in row) for task, row in arm.correct.items()}
        write_json(path, {"key": key, "summary": arm.summary, "correct": correct_rows})
        return arm

    def _scored(self, change: Change | None, tick: Callable[[int, int], None]) -> Arm:
        arguments = (self.tokenizer, self.recipe.evaluate, self.recipe.seed, self.prompts, tick)
        if change is None:
            return evaluate_model(self.model, *arguments)
        if change.swap is not None:
            assert self.recipe.teacher is not None
            plan, section = swap_plan(change, self.model.config, self.recipe.teacher, self.teacher.config)
            return evaluate_model(splice_model(self.model, plan, section, self.teacher), *arguments)
        specs = family_of(self.model.config).mixers(self.model.config)
        assert change.layers != "minimal"
        with altered(self.model, specs, off_heads(change, specs), change.layers, change.mask_last_row, change.drop):
            return evaluate_model(self.model, *arguments)


def _score(table: _Table, changes: Sequence[Change | None], arms: dict[str, Arm], reporter: ProgressLines) -> None:
    total = len(arms) + len(changes)
    for change in changes:
        name = "base" if change is None else change.name
        arms[name] = table.arm(change, part_of(reporter, name, len(arms), total))


def minimal_model(arms: Mapping[str, Arm], pruned: Sequence[str], layers: int, margin: float) -> dict[str, Any]:
    """Find the smallest number of first layers that retrieve as well as the whole model.

    Layers are pruned from the end (`pruned` has the largest model first) until KV-retrieval accuracy drops, over all
    numbers of pairs. A drop must be larger than `margin` and significant at 0.05 by an exact one-sided McNemar test
    against the base.

    Returns:
        `layers` of the minimal model and its `accuracy`; the accuracy of the `base`; `p_value` (1 for the whole model);
        `margin`; `of`, the number of layers of the whole model.
    """
    before = _pooled(arms["base"].correct)["kv_retrieval"]
    minimal = {"layers": layers, "of": layers, "accuracy": before.mean(), "base": before.mean(), "p_value": 1.0}
    for count, name in zip(range(layers - 1, 0, -1), pruned, strict=True):
        after = _pooled(arms[name].correct)["kv_retrieval"]
        p_value = mcnemar(before, after)
        if p_value < LEVEL and before.mean() - after.mean() > margin:
            break
        minimal |= {"layers": count, "accuracy": after.mean(), "p_value": p_value}
    return {
        **{key: value if isinstance(value, int) else float(value) for key, value in minimal.items()},
        "margin": margin,
    }


def _pooled(by_task: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Join the rows of a group of tasks: all numbers of pairs, and both halves of the facts. group -> (N,)."""
    rows: dict[str, list[NDArray[Any]]] = {}
    for task, values in by_task.items():
        rows.setdefault(task.partition("/")[0].removesuffix("_seen"), []).append(np.asarray(values))
    return {name: np.concatenate(parts) for name, parts in rows.items()}


def side_by_side(arms: Mapping[str, Arm]) -> dict[str, dict[str, Any]]:
    """Tabulate every arm: accuracy by group of tasks with its Wilson interval, and perplexity.

    `p_value` is an exact one-sided McNemar test against the base. `worse` is its result at 0.05 after Holm's correction
    over the arms.
    """
    flags = {name: _pooled(arm.correct) for name, arm in arms.items()}
    table: dict[str, dict[str, Any]] = {name: {} for name in arms}
    others = [name for name in arms if name != "base"]
    for task, before in flags["base"].items():
        for name in arms:
            share = wilson(int(flags[name][task].sum()), len(flags[name][task]))
            table[name][task] = {"accuracy": share.value, "low": share.low, "high": share.high, "n": share.n}
        p_values = [mcnemar(before, flags[name][task]) for name in others]
        for name, p_value, worse in zip(others, p_values, holm(p_values, LEVEL), strict=True):
            table[name][task] |= {"p_value": p_value, "worse": worse}
    for name, arm in arms.items():
        table[name]["perplexity"] = arm.summary["perplexity"]
    return table


def _draw(results: Mapping[str, Any], single: Sequence[str], folder: Path) -> None:
    """Draw the single changes (all tasks, and retrieval by number of pairs), and one figure for each sweep."""
    from surgery.report.figures.by_value import tasks_by_part  # matplotlib is slow to import
    from surgery.report.figures.curves import accuracy_by_pairs

    tasks, chance = results["tasks"], results["chance"]
    if single:
        tasks_by_part("tasks_by_arm", tasks["base"], {name: tasks[name] for name in single}, chance, folder)
        accuracy_by_pairs({name: results["arms"][name]["kv_retrieval"] for name in ("base", *single)}, folder)
    for kind, names in results["sweeps"].items():
        sites = {}  # by the layer or head that an arm changes: 3 for `prune_03`, L1H2 for `disable_l1h2`
        for name in reversed(names) if kind == "prune" else names:
            last = name.rpartition("_")[2]
            sites[str(int(last)) if last.isdigit() else last.upper()] = tasks[name]
        minimal = results["minimal"]["layers"] if kind == "prune" else None
        tasks_by_part(kind, tasks["base"], sites, chance, folder, minimal)
