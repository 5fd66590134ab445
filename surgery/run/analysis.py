"""Evaluate one model with parts of it removed, and find its minimal model.

The procedures are those of the Gather-and-Aggregate paper (arXiv 2504.18574):

    prune                                              Figure 2
    drop_one in the minimal model                      Figure 3
    keep in two layers                                 Table 1
    a disabled head, accuracy by number of pairs       Figure 4
    swap_one                                           Figure 7
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedModel

from surgery.errors import PlanError, RecipeError, SurgeryError
from surgery.evaluate.evaluation import Arm, evaluate_model
from surgery.evaluate.prompts import make_prompts
from surgery.files.atomic import fingerprint, new_folder, read_json, write_json, write_text
from surgery.files.lock import hold
from surgery.files.ownership import check_apart, check_replaceable, kind_of, mark, remove
from surgery.files.shipped import local_path
from surgery.models.alterations import altered, attends
from surgery.models.loading import check_vocabulary, load_config, load_model, load_tokenizer, revision_of
from surgery.models.lookup import family_of, geometry_of
from surgery.models.runtime import run_device
from surgery.recipe import AnalysisRecipe, Change, Splice, Swap, Sweep, Teacher, as_base, to_yaml
from surgery.recipe.inputs import inputs_of
from surgery.recipe.public import is_hub_id
from surgery.report.progress_lines import ProgressLines
from surgery.run.context import part_of
from surgery.splice.graft import splice_model
from surgery.splice.plan import make_plan
from surgery.stats import holm, mcnemar, wilson
from surgery.types import HeadId, HeadSet, MixerSpec, Plan, ScoredHead, head_set_from_json

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


def expand(
    recipe: AnalysisRecipe,
    config: PreTrainedConfig,
    teacher_config: PreTrainedConfig | None = None,
    minimal: int | None = None,
) -> tuple[dict[str, list[Change]], list[Change]]:
    """Return the changes of each sweep in the recipe's order, and the changes that the recipe lists, all checked.

    `minimal` is the number of layers of `layers: minimal`, the whole model if it is not known yet. Raises RecipeError
    as `check_change`, or if two changes have the same name, a heads.json belongs to another model, or a sweep runs more
    layers than it has.
    """
    whole = minimal in (None, config.num_hidden_layers)
    resolved = {"layers": None if whole else minimal}
    sweeps: dict[str, list[Change]] = {}
    for listed in recipe.sweeps:
        sweep = listed.model_copy(update=resolved) if listed.layers == "minimal" else listed
        sweeps[sweep.kind] = list(_changes(sweep, config))
    single = [c.model_copy(update=resolved) if c.layers == "minimal" else c for c in recipe.changes]
    taken = {change.name for changes in sweeps.values() for change in changes}
    for change in single:
        if change.name in taken:
            raise RecipeError("changes", change.name, "An arm of a sweep has this name. Choose another one.")
    for change in (*single, *(c for changes in sweeps.values() for c in changes)):
        check_change(change, config, recipe.teacher, teacher_config)
    return sweeps, single


def _changes(sweep: Sweep, config: PreTrainedConfig) -> Iterator[Change]:
    """Yield one change for each layer or head. Layer numbers in names are zero-padded."""
    total, layers = config.num_hidden_layers, sweep.layers
    assert layers != "minimal"
    if layers is not None and layers >= total:
        raise RecipeError(f"sweeps.{sweep.kind}.layers", layers, f"The model has {total} layers. Set a smaller number.")
    digits = max(2, len(str(total - 1)))
    running = range(total if layers is None else layers)
    if sweep.kind == "prune":
        if config.num_hidden_layers < 2:
            raise RecipeError("sweeps.prune", "1 layer", "There is nothing to prune. Remove the sweep.")
        for count in range(total - 1, 0, -1):
            yield Change(name=f"prune_{count:0{digits}d}", layers=count)
    elif sweep.kind == "drop_one":
        for layer in running:
            yield Change(name=f"drop_{layer:0{digits}d}", drop=(layer,), layers=layers)
    elif sweep.kind == "swap_one":
        for layer in running:
            swap = Swap(layer=layer, with_block=sweep.with_block)
            yield Change(name=f"swap_{layer:0{digits}d}", swap=swap)
    else:
        heads = [head for head in _heads(sweep, config) if head.layer in running]
        for head in heads[: sweep.top]:
            yield Change(name=f"disable_{str(head).lower()}", disable=(str(head),), layers=layers)


def _heads(sweep: Sweep, config: PreTrainedConfig) -> list[HeadId]:
    """Heads in the order of heads.json if the sweep names one, otherwise all heads by layer."""
    if sweep.heads is None:
        return [head for spec in family_of(config).mixers(config) for head in spec.heads]
    field, again = "sweeps.disable_one.heads", "Run `surgery locate` on this model."
    try:
        head_set = head_set_from_json(read_json(Path(local_path(sweep.heads))))
    except SurgeryError as error:  # whose hints are for the files of a run
        raise RecipeError(field, f"{sweep.heads} ({error.value or 'missing'})", f"Set a heads.json. {again}") from error
    if head_set.geometry != geometry_of(config):
        raise RecipeError(field, sweep.heads, f"These heads were located in another model. {again}")
    return [scored.head for scored in head_set.heads]


def check_change(
    change: Change,
    config: PreTrainedConfig,
    teacher: Teacher | None = None,
    teacher_config: PreTrainedConfig | None = None,
) -> None:
    """Check a change against the model. `layers: minimal` is checked as the whole model.

    Raises RecipeError if the model has no such head or layer, it is not among the layers that run, or the swap is not
    possible.
    """
    specs, where = family_of(config).mixers(config), f"changes.{change.name}"
    total = config.num_hidden_layers
    if isinstance(change.layers, int) and change.layers >= total:
        raise RecipeError(f"{where}.layers", change.layers, f"The model has {total} layers. Set a smaller number.")
    running = set(range(change.layers if isinstance(change.layers, int) else total))
    for layer in change.drop:
        if layer not in running:
            raise RecipeError(f"{where}.drop", layer, f"Set a layer from 0 to {max(running)}.")
    running -= set(change.drop)
    mixers = {spec.name: spec for spec in specs if spec.layer in running}
    for field, head in [("disable", head) for head in change.disable] + [("keep", head) for head in change.keep]:
        parsed = HeadId.parse(head)
        spec = mixers.get(parsed.mixer)
        if spec is None or parsed.head >= spec.num_heads:
            names = [str(head) for spec in mixers.values() for head in spec.heads]
            heads = f"from {names[0]} to {names[-1]}" if names else "of a layer that runs"
            raise RecipeError(f"{where}.{field}", head, f"No layer that runs has this head. Set a head {heads}.")
    for layer in change.keep_in:
        if layer not in {spec.layer for spec in mixers.values()}:
            raise RecipeError(f"{where}.keep_in", layer, "This layer has no heads or does not run. Set another one.")
    if change.mask_last_row and not any(attends(config, spec) for spec in mixers.values()):
        hint = "The model has no attention in the layers that run. Remove the key."
        raise RecipeError(f"{where}.mask_last_row", "true", hint)
    if change.swap is not None:
        assert teacher is not None and teacher_config is not None
        swap_plan(change, config, teacher, teacher_config)


def off_heads(change: Change, specs: Sequence[MixerSpec]) -> dict[str, list[int]]:
    """Heads that `disable` and `keep` remove, by `MixerSpec.name`."""
    kept = {HeadId.parse(name) for name in change.keep}
    layers = set(change.keep_in) or {head.layer for head in kept}
    off = {spec.name: [head.head for head in spec.heads if head not in kept] for spec in specs if spec.layer in layers}
    for head in map(HeadId.parse, change.disable):
        off.setdefault(head.mixer, []).append(head.head)
    return off


def swap_plan(
    change: Change, config: PreTrainedConfig, teacher: Teacher, teacher_config: PreTrainedConfig
) -> tuple[Plan, Splice]:
    """Make the plan and the recipe section that splice this swap. Raises RecipeError if it cannot be."""
    assert change.swap is not None
    layer, teacher_layer = change.swap.layer, change.swap.teacher_layer
    head, donor = HeadId(layer, 0), HeadId(layer if teacher_layer is None else teacher_layer, 0)
    section = Splice(
        select="list",
        heads=(str(head),),
        unit="layer",
        init="teacher",
        mode="replace",
        with_block=change.swap.with_block,
        teacher=teacher.model_copy(update={"donors": {str(head): str(donor)}}),
    )
    chosen = (ScoredHead(head, "neither", "segment_end", {}),)
    heads = HeadSet(teacher.model, "", geometry_of(config), chosen, chosen, "list", 0)
    try:
        return make_plan(heads, config, section, 0, teacher_config), section
    except PlanError as error:
        hint = "Only llamba models can swap layers. Remove the swap." if error.field == "splice.unit" else error.hint
        raise RecipeError(f"changes.{change.name}.swap", error.value, hint) from None
