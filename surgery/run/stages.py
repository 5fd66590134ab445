"""The stages of a run, in order."""

from __future__ import annotations

from surgery.errors import RunError
from surgery.recipe import Recipe
from surgery.run.evaluate_stage import EvaluateStage
from surgery.run.export_stage import ExportStage
from surgery.run.locate_stage import LocateStage
from surgery.run.splice_stages import PlanStage, SpliceStage
from surgery.run.stage import Stage
from surgery.run.train_stages import ControlStage, TextStage, TrainStage

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
