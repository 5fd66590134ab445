"""Run the stages of a recipe in order, skip finished ones, resume an interrupted run.

A stage is fresh if its manifest matches the hashes of its inputs, its sections of the recipe and its version. Otherwise
it runs again. With several processes, all of them locate and train; only rank 0 runs the other stages and writes files.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list

from surgery.errors import RunError
from surgery.files.lock import hold
from surgery.models.loading import check_vocabulary
from surgery.recipe import Recipe, to_yaml
from surgery.recipe.inputs import inputs_of
from surgery.report.progress_lines import ProgressLines
from surgery.report.results import answer_spans_text
from surgery.run.context import Run
from surgery.run.evaluate_stage import EvaluateStage
from surgery.run.export_stage import ExportStage
from surgery.run.locate_stages import LocateStage, PlanStage, SpliceStage
from surgery.run.log import logged
from surgery.run.sharing import find_origin, origin_text, take_stage
from surgery.run.stage import Stage
from surgery.run.train_stages import ControlStage, TextStage, TrainStage
from surgery.train.training import make_accelerator

STAGES: tuple[Stage, ...] = (
    LocateStage(), PlanStage(), SpliceStage(),
    TextStage(), TrainStage(), ControlStage(), EvaluateStage(), ExportStage(),
)  # fmt: skip


def stages_of(recipe: Recipe) -> tuple[Stage, ...]:
    """Stages of a recipe, in order. With `splice: null` the base is a hybrid already, and none is spliced."""
    stages = STAGES if recipe.splice is not None else STAGES[3:]
    return tuple(stage for stage in stages if recipe.train.base_texts is not None or not isinstance(stage, TextStage))


def choose_stages(recipe: Recipe, first: str | None, last: str | None) -> tuple[Stage, ...]:
    """Return the stages from `first` to `last`, or to the ends. Raises RunError for a name that is not a stage."""
    stages = stages_of(recipe)
    known = [stage.name for stage in stages]
    for option, name in (("--from", first), ("--to", last)):
        if name is not None and name not in known:
            tuned = " With splice: null the base is a hybrid already." if recipe.splice is None else ""
            raise RunError(option, name, f"Use one of the stages {', '.join(known)}.{tuned}")
    begin = known.index(first) if first else 0
    end = known.index(last) if last else len(stages) - 1
    if begin > end:
        raise RunError("--to", last, f"This stage comes before {first}. Set --to to {first} or a later stage.")
    return stages[begin : end + 1]


def run_pipeline(
    recipe: Recipe,
    folder: Path,
    first: str | None = None,
    last: str | None = None,
    overwrite: bool = False,
    reporter: ProgressLines | None = None,
    file: Path | None = None,
    siblings: Sequence[Path] = (),
) -> Run:
    """Run the stages of a recipe from `first` to `last`. Finished stages are skipped.

    Args:
        recipe: the validated recipe.
        folder: run folder. It is locked until the run ends.
        first: start at this stage, even if it is finished. The stages before it must be finished with this recipe.
        last: stop after this stage.
        overwrite: remove a run of another recipe from `folder`.
        reporter: receives progress.
        file: the recipe's file, which must not lie in a folder that is removed.
        siblings: folders of other runs. A stage that one of them finished with the same key is copied from there.

    Returns:
        The run, with its folder and loaded models.

    Raises:
        RunError: a stage is unknown; the folder belongs to another recipe, to a running process or to no run; or an
            input is missing or would be removed.
        SurgeryError: a model, the data or a stage fails.
    """
    stages = choose_stages(recipe, first, last)
    accelerator = make_accelerator()
    is_main = accelerator.is_main_process
    names = tuple(stage.name for stage in stages)
    shown = reporter if reporter is not None and is_main else ProgressLines()
    run = Run(recipe, folder, accelerator, shown, names, tuple(siblings))
    claim = to_yaml(recipe), overwrite, inputs_of(recipe, file)
    with hold(folder, "run folder") if is_main else nullcontext():
        if is_main:
            is_replaced = run.rundir.check(*claim)
        check_inputs(run)
        if is_main:
            known = stages_of(recipe)
            for earlier in known[: known.index(stages[0])]:  # their files may be edited
                if not run.rundir.is_finished(earlier.name, earlier.key(run), earlier.outputs(recipe)):
                    hint = f"The stage {earlier.name} is not finished, or was run with other settings. Run it first."
                    raise RunError(stages[0].name, f"needs {earlier.name}", hint)
            changes = [] if is_replaced else run.rundir.changes(recipe)
            run.rundir.claim(*claim)
            if changes:
                listed = [*changes[:3], *([f"{len(changes) - 3} more"] if len(changes) > 3 else [])]
                hint = "Stages that depend on it run again, others do not"
                run.reporter.note("recipe", f"changed since the last run here: {'; '.join(listed)}. {hint}")
        accelerator.wait_for_everyone()
        with logged(run) if is_main else nullcontext():
            for stage in stages:
                run_stage(run, stage, forced=stage.name == first)
    return run


def check_inputs(run: Run) -> None:
    """Let every stage of this run check its models, heads and data, before anything is written or measured."""
    stages = [stage for stage in stages_of(run.recipe) if stage.name in run.stages]
    for stage in stages:
        stage.check_configs(run)
    for stage in stages:
        stage.check_machine(run)
    check_vocabulary(run.tokenizer(), run.base().config)  # loads the base, so checks its weights
    for stage in stages:
        stage.check_tokenizers(run)
    for stage in stages:
        stage.check_data(run)
    if run.accelerator.is_main_process and "train" in run.stages:
        for text in run.recipe.notes:
            run.reporter.note("recipe", text)
        for name, counts in run.answer_spans.items():
            run.reporter.note("data", f"{name}: answer_span: auto: {answer_spans_text(counts)}")


def run_stage(run: Run, stage: Stage, forced: bool) -> None:
    """Run a stage, unless it is finished or can be taken from a sibling.

    The `seconds` of its manifest are those of this session, and of the steps of a training that earlier sessions left
    in the checkpoint. So every step counts once. The reporter gets the seconds of this session.
    """
    is_main = run.accelerator.is_main_process
    decided: list[Any] = [None, ""]
    if is_main:
        key = stage.key(run)
        decided = [key, "" if forced else _skip(run, stage, key)]
    if run.accelerator.num_processes > 1:
        broadcast_object_list(decided)
    key, reason = decided
    if reason:
        run.reporter.skip(stage.name, reason)
        return
    began = time.perf_counter()
    is_empty = not stage.outputs(run.recipe)
    if is_empty:
        run.reporter.note(stage.name, "the recipe has none")
    else:
        run.reporter.start(stage.name, stage.what)
    if is_main:
        run.rundir.forget(stage.name)
    earlier = stage.work(run, key) if stage.together or is_main else None
    run.accelerator.wait_for_everyone()
    seconds = time.perf_counter() - began
    if is_main:
        run.rundir.finish(stage.name, key, stage.outputs(run.recipe), seconds + (earlier or 0.0))
    if not is_empty:
        run.reporter.finish(stage.name, seconds)


def _skip(run: Run, stage: Stage, key: str) -> str:
    """Return why the stage need not run: it is finished, or is taken from a sibling. Empty if it has to run."""
    if run.rundir.is_fresh(stage.name, key, stage.outputs(run.recipe)):
        return "already finished with the same inputs"
    origin = find_origin(run, stage, key) if run.siblings else None
    if origin is None:
        return ""
    take_stage(run, stage, key, *origin)
    return origin_text(*origin)
