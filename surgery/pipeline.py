"""Runs the stages in order: freshness, resume, who writes. Must never know: how a stage does its work.

A stage is fresh if its manifest matches the hashes of its inputs, its sections of the recipe and its version; else it
runs again. Under a launcher every process trains; rank 0 alone does the rest and writes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from surgery.checkpoint import load_config
from surgery.errors import PlanError, RunError
from surgery.families import family_of, geometry_of
from surgery.heads import HeadId, HeadSet, ScoredHead, head_set_from_json
from surgery.plan import check_in_range, check_not_spliced, make_plan, splice_field
from surgery.recipe import Recipe, to_yaml
from surgery.rundir import RunDir, read_json
from surgery.sizes import meta_model, sizes_of
from surgery.stages import STAGE_NAMES, STAGES, Reporter, Run, Silent, Stage
from surgery.train import make_accelerator


def run_pipeline(
    recipe: Recipe,
    folder: Path,
    first: str | None = None,
    last: str | None = None,
    overwrite: bool = False,
    reporter: Reporter | None = None,
) -> Run:
    """Runs the stages from `first` to `last`; finished ones are skipped.

    Args:
        folder: of the run; taken for this recipe, or refused.
        first: run this stage even if it is fresh, and begin there; those above must be finished with this recipe.
        last: stop after this stage.

    Raises:
        RunError: an unknown stage, a folder of another recipe, an input that is missing.
        SurgeryError: what a stage raises.
    """
    for option, name in (("--from", first), ("--to", last)):
        if name is not None and name not in STAGE_NAMES:
            raise RunError(option, name, f"Stages are: {', '.join(STAGE_NAMES)}.")
    begin = STAGE_NAMES.index(first) if first else 0
    end = STAGE_NAMES.index(last) if last else len(STAGES) - 1
    if begin > end:
        raise RunError("--to", last, f"It comes before {first}.")
    accelerator = make_accelerator()
    is_main = accelerator.is_main_process
    names = tuple(stage.name for stage in STAGES[begin : end + 1])
    run = Run(recipe, folder, accelerator, reporter if reporter is not None and is_main else Silent(), names)
    _look_first(run)
    if is_main:
        _check_above(run, STAGES[:begin])
        run.rundir.claim(to_yaml(recipe), overwrite)
    accelerator.wait_for_everyone()
    for stage in STAGES[begin : end + 1]:
        _run_stage(run, stage, forced=stage.name == first)
    return run


def _look_first(run: Run) -> None:
    """Everything about the base and the heads that can be refused before anything is written or measured."""
    recipe = run.recipe
    config = load_config(recipe.base)
    specs = {spec.layer: spec for spec in family_of(config).mixers(config)}
    check_not_spliced(config)
    for head in map(HeadId.parse, recipe.splice.heads):
        check_in_range(head, specs)
    heads = sum(spec.num_heads for spec in specs.values())
    if recipe.splice.num_heads > heads:
        raise PlanError("splice.num_heads", recipe.splice.num_heads, f"The model has {heads} heads.")
    if recipe.splice.select == "sharpen" and recipe.splice.num_heads > recipe.locate.top_k:
        raise PlanError("splice.num_heads", recipe.splice.num_heads, "Raise locate.top_k to at least that number.")
    run.tokenizer()
    run.base()


def _check_above(run: Run, stages: tuple[Stage, ...]) -> None:
    """Stages that are not run again must have been finished with these very settings; edits by hand are welcome."""
    for stage in stages:
        if not run.rundir.is_finished(stage.name, stage.key(run), stage.outputs(run)):
            hint = f"It is not finished, or was with other settings. Run the stage {stage.name} first."
            raise RunError(run.stages[0], f"needs {stage.name}", hint)


def _run_stage(run: Run, stage: Stage, forced: bool) -> None:
    decided: list[Any] = [None, None]
    if run.accelerator.is_main_process:
        key = stage.key(run)
        decided = [key, not forced and run.rundir.is_fresh(stage.name, key, stage.outputs(run))]
    if run.accelerator.num_processes > 1:
        broadcast_object_list(decided)
    key, fresh = decided
    if fresh:
        run.reporter.skip(stage.name, "finished before, and nothing it depends on has changed")
        return
    began = time.perf_counter()
    run.reporter.start(stage.name, stage.what)
    if run.accelerator.is_main_process:
        run.rundir.forget(stage.name)
    if stage.together or run.accelerator.is_main_process:
        stage.work(run, key)
    run.accelerator.wait_for_everyone()
    seconds = time.perf_counter() - began
    if run.accelerator.is_main_process:
        run.rundir.finish(stage.name, key, stage.outputs(run), seconds)
    run.reporter.finish(stage.name, seconds)


def dry_run(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """What a run would do, from configs alone: no weights are loaded and nothing is written.

    Heads that are not located yet are stood in for by the first heads of the middle layer: counts are the same.
    """
    config = load_config(recipe.base)
    family = family_of(config)
    specs = family.mixers(config)
    heads = _located(recipe, folder)
    located = heads is not None
    if heads is None:
        middle = specs[len(specs) // 2].layer
        order = sorted(specs, key=lambda spec: abs(spec.layer - middle))
        free = [HeadId(spec.layer, h) for spec in order for h in range(spec.num_heads)]
        named = [HeadId.parse(h) for h in recipe.splice.heads] or free[: recipe.splice.num_heads]
        chosen = tuple(ScoredHead(h, "neither", "answer_token", {}) for h in named)
        heads = HeadSet(recipe.base.model, "", geometry_of(config), (), chosen, "stand-in", recipe.seed)
    plan = make_plan(heads, config, recipe.splice, recipe.seed)
    fields = splice_field(plan, recipe.splice, config.conv_kernel)
    with torch.device("meta"):
        hybrid = family.build_hybrid(family.hybrid_config(config, fields))
    base, after = sizes_of(meta_model(config)), sizes_of(hybrid)
    return {
        "heads": [str(h) for h in plan.heads],
        "located": located,
        "sites": fields,
        "parameters": base.parameters,
        "new_parameters": after.new_parameters,
        "trainable_parameters": after.new_parameters if recipe.train.trains == "new_heads" else after.parameters,
        "state_bytes": {"base": base.state_bytes, "hybrid": after.state_bytes},
        "kv_bytes_per_token": after.kv_bytes_per_token,
        "steps": recipe.train.steps,
        "documents": recipe.train.steps * sum(source.rows for source in recipe.train.sources),
    }


def _located(recipe: Recipe, folder: Path) -> HeadSet | None:
    """The heads of an earlier run, if they were located with these very settings."""
    manifest = RunDir(folder).manifest("locate")
    if manifest is None or not (folder / "heads.json").is_file():
        return None
    run = Run(recipe, folder, make_accelerator())
    fresh = manifest["key"] == STAGES[0].key(run)
    return head_set_from_json(read_json(folder / "heads.json")) if fresh else None
