"""Brief training of a hybrid, of its control, and the pretraining of small bases."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import RunError
from surgery.files.atomic import fingerprint
from surgery.models.loading import check_vocabulary, load_model, load_tokenizer, revision_of
from surgery.recipe import Train, TrainStage, as_base
from surgery.recipe.train import FROM_TEACHER
from surgery.train.checkpoints import checkpoints, set_aside_broken
from surgery.train.logits_cache import LogitsCache
from surgery.train.teacher import Teacher, check_tokenizers
from surgery.train.tracking import log, tracked
from surgery.train.trainer import OnStep, Trainer
from surgery.types import Graft, Plan


def make_accelerator() -> Accelerator:
    """The Accelerator of this process, on the GPU if there is one.

    Raises:
        RunError: a launcher started several processes and each of them sees itself alone; they would all write.
    """
    # Rank 0 locates, evaluates and exports while the others wait for it.
    patience = InitProcessGroupKwargs(timeout=timedelta(days=1))
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[patience])
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != world:
        value = f"{accelerator.num_processes} of {world}"
        raise RunError("num_processes", value, "Launch with torchrun, or with accelerate launch and a GPU each.")
    return accelerator


def train_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    section: Train,
    plan: Plan | None = None,
    base: PreTrainedModel | None = None,
    seed: int = 0,
    folder: Path | str | None = None,
    accelerator: Accelerator | None = None,
    on_step: OnStep | None = None,
    control: bool = False,
    outputs: Path | None = None,
) -> list[dict[str, float]]:
    """Trains `model` in place, stage after stage, and returns the losses of every step.

    Args:
        plan: what was spliced, so that attention supervision knows its heads; None trains without.
        base: the frozen model for the `keep` objective.
        folder: for the checkpoints to resume from; training goes on from the newest one that is there.
            None trains without: an interrupted call begins anew.
        on_step: called after each step with its number and its entry of the history: losses, tokens, seconds.
        control: `model` has no splice; stages that train new heads alone are left out.
        outputs: folder for what is kept besides the weights: `adapters/` in PEFT's format, `teacher_logits/` where a
            stage says `distil.cache`, `logs/` of trackers that write files. None keeps nothing, and logs nothing.

    Raises:
        TrainingDiverged: loss or gradient is not finite, or grows; says which step, and keeps the last good one.
        RunError: the folder holds the steps of another training.
        DataError: a row of the user's data cannot be used.
        ModelError: the tokenizer is another model's.
    """
    check_vocabulary(tokenizer, model.config)
    grafts = plan.grafts if plan and not control else ()
    layers = tuple(sorted({graft.site.layer for graft in plan.grafts})) if plan else ()
    accelerator = accelerator or make_accelerator()
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    numbers = [n for n, stage in enumerate(section.sequence) if not (control and stage.trains == "new_heads")]
    steps = {n: _steps_of(folder, section, n) for n in numbers}
    for folder_of_stage in filter(None, steps.values()):
        set_aside_broken(folder_of_stage, accelerator)
    begun = [n for n in numbers if steps[n] is not None and checkpoints(steps[n])]  # type: ignore[arg-type]
    history: list[dict[str, float]] = []

    def note(step: int, entry: dict[str, float]) -> None:
        log(accelerator, step, entry)
        if on_step is not None:
            on_step(step, entry)

    names = section.trackers if outputs is not None else ()
    logs = (outputs or Path()) / "logs" / ("no_splice" if control else "hybrid")
    with tracked(accelerator, names, logs, {"seed": seed, "steps": section.num_all_steps}):
        for number in numbers[numbers.index(max(begun)) if begun else 0 :]:
            stage = section.sequence[number]
            teacher = load_teacher(section, stage, tokenizer, model, grafts) if stage.uses(*FROM_TEACHER) else None
            cached = open_cache(outputs, section, stage, tokenizer, accelerator.is_main_process)
            trainer = Trainer(
                model, tokenizer, section, seed, steps[number], accelerator, base, grafts, note,
                number, teacher, cached, layers, history,
            )  # fmt: skip
            history = trainer.run()
            _finish(trainer, outputs if accelerator.is_main_process and not control else None)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])
    return history


def _finish(trainer: Trainer, outputs: Path | None) -> None:
    """Keeps a stage's adapters, and merges them: the next stage, and the export, have a plain model."""
    if trainer.adapters is None:
        return
    if outputs is not None:
        folder = outputs / "adapters" / (trainer.stage.name if trainer.section.stages else "")
        trainer.adapters.save(folder, str(trainer.model.name_or_path))
    trainer.adapters.merge()


def load_teacher(
    section: Train,
    stage: TrainStage,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    grafts: Sequence[Graft] = (),
) -> Teacher:
    """The recipe's teacher, if it can teach this model.

    Raises:
        RecipeError: its tokenizer is another, or it lacks tokens, heads, layers or the width that the stage compares.
    """
    assert section.teacher is not None
    given = as_base(section.teacher)
    check_tokenizers(tokenizer, load_tokenizer(given))
    used = FROM_TEACHER if grafts else FROM_TEACHER - {"reading", "mixing"}
    objectives = [name for name in sorted(used) if stage.uses(name)]
    return Teacher(load_model(given), tokenizer, model.config, grafts, stage.align, objectives)


def open_cache(
    outputs: Path | None, section: Train, stage: TrainStage, tokenizer: PreTrainedTokenizerBase, main: bool = True
) -> LogitsCache | None:
    """The teacher's logits on disk, for this teacher, tokenizer and `top_k`; None where the stage keeps none."""
    if section.teacher is None or outputs is None or not (stage.distil.cache and stage.uses("distil")):
        return None
    identity = {
        "teacher": revision_of(as_base(section.teacher)),
        "tokenizer": fingerprint(sorted(tokenizer.get_vocab().items())),
        "top_k": stage.distil.top_k,
    }
    return LogitsCache(outputs / "teacher_logits" / f"top{stage.distil.top_k}", identity, main=main)


def _steps_of(folder: Path | str | None, section: Train, number: int) -> Path | None:
    """Where a stage keeps its steps."""
    if folder is None:
        return None
    return Path(folder) / f"{number}-{section.stages[number].name}" if section.stages else Path(folder)
