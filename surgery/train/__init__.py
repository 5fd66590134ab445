"""Brief training of a hybrid, of its control, and the pretraining of small bases."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import RunError
from surgery.heads import Plan
from surgery.recipe import Train
from surgery.train.loop import OnStep, Trainer


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


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    section: Train,
    plan: Plan | None = None,
    base: PreTrainedModel | None = None,
    seed: int = 0,
    folder: Path | str | None = None,
    accelerator: Accelerator | None = None,
    on_step: OnStep | None = None,
) -> list[dict[str, float]]:
    """Trains `model` in place and returns the losses of every step.

    Args:
        plan: what was spliced, so that attention supervision knows its heads; None trains without (the control).
        base: the frozen model for the `keep` objective.
        folder: for `step_*/`, the checkpoints to resume from; training goes on from the newest one that is there.
            None trains without: an interrupted call begins anew.
        on_step: called with (step, losses) after each step.

    Raises:
        TrainingDiverged: loss or gradient is not finite; says which step, and keeps the last good one.
        RunError: the folder holds the steps of another training.
    """
    grafts = plan.grafts if plan else ()
    accelerator = accelerator or make_accelerator()
    steps = Path(folder) if folder is not None else None
    return Trainer(model, tokenizer, section, seed, steps, accelerator, base, grafts, on_step).run()


__all__ = ["make_accelerator", "train"]
