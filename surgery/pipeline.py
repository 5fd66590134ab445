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

from surgery.checkpoint import load_config, revision_of
from surgery.errors import RunError
from surgery.families import family_of, geometry_of
from surgery.heads import HeadId, HeadSet, ScoredHead, head_set_from_json
from surgery.plan import make_plan, splice_field
from surgery.recipe import Recipe, to_yaml
from surgery.rundir import read_json
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
        first: run this stage even if it is fresh, and begin there; what it reads must be there.
        last: stop after this stage.

    Raises:
        RunError: an unknown stage, a folder of another recipe, an input that is missing.
        SurgeryError: what a stage raises.
    """
    for option, name in (("--from", first), ("--to", last)):
        if name is not None and name not in STAGE_NAMES:
            raise RunError(option, name, f"Stages are: {', '.join(STAGE_NAMES)}.")
    accelerator = make_accelerator()
    is_main = accelerator.is_main_process
    run = Run(recipe, folder, accelerator, reporter if reporter is not None and is_main else Silent())
    begin = STAGE_NAMES.index(first) if first else 0
    end = STAGE_NAMES.index(last) if last else len(STAGES) - 1
    revision = revision_of(recipe.base)  # also the first look at the base: nothing is written before
    run.base()
    if is_main:
        run.rundir.claim(to_yaml(recipe), overwrite)
    accelerator.wait_for_everyone()
    for stage in STAGES[begin : end + 1]:
        _run_stage(run, stage, revision, forced=stage.name == first)
    return run


def _run_stage(run: Run, stage: Stage, revision: str, forced: bool) -> None:
    outputs = [run.folder / name for name in stage.writes]
    if stage.name == "control" and run.recipe.train.has_control:
        outputs += [run.folder / "no_splice", run.folder / "no_splice_training.json"]
    missing = [name for name in stage.reads if name != "no_splice" and not (run.folder / name).exists()]
    if missing:
        writer = next(s.name for s in STAGES if missing[0] in s.writes)
        raise RunError(stage.name, f"{missing[0]} is missing", f"Run the stage {writer} first.")
    decided: list[Any] = [None, None]
    if run.accelerator.is_main_process:
        key = stage.key(run, revision)
        decided = [key, not forced and run.rundir.is_fresh(stage.name, key, outputs)]
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
        run.rundir.finish(stage.name, key, outputs, seconds)
    run.reporter.finish(stage.name, seconds)


def dry_run(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """What a run would do, from configs alone: no weights are read and nothing is written.

    Heads that are not located yet are stood in for by the first heads of the middle layer: counts are the same.
    """
    config = load_config(recipe.base)
    family = family_of(config)
    specs = family.mixers(config)
    located = (folder / "heads.json").is_file()
    if located:
        heads = head_set_from_json(read_json(folder / "heads.json"))
    else:
        middle = specs[len(specs) // 2]
        named = [HeadId.parse(h) for h in recipe.splice.heads]
        stand_in = named or [HeadId(middle.layer, h) for h in range(recipe.splice.num_heads)]
        chosen = tuple(ScoredHead(h, "neither", "answer_token", {}) for h in stand_in)
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
