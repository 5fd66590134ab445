"""Estimate the time of training: run a few steps with random weights, or divide the FLOPs by a known speed."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import SurgeryError
from surgery.recipe import Recipe, TrainStage
from surgery.run.memory_estimate import StepCost
from surgery.train.training import train_model
from surgery.types import Plan

STEPS = 3  # of each stage that are run; the first is not counted
_MOST_BYTES = 2 * 2**30  # of a training that is run to be timed
_MOST_FLOPS = {"cpu": 1e11, "cuda": 1e13}  # of a step that is run to be timed

Build = Callable[[], PreTrainedModel]


def estimate_time(
    recipe: Recipe,
    costs: Sequence[tuple[TrainStage, StepCost]],
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan,
    hybrid: Build,
    base: Build,
    accelerator: Accelerator,
) -> dict[str, Any] | None:
    """Estimate the seconds of training, for all arms, from the cost of a step of every stage.

    With `hardware.tflops` the time follows from the FLOPs. Otherwise a few steps are run on this machine. `hybrid` and
    `base` build the models on the meta device.

    Returns:
        `seconds` of the training, `step`: seconds of the longest step, `measured_on`: the device, or "" with
        `hardware.tflops`, and `load`: the number of waiting or running processes per CPU before the measurement, 0 if
        it is not known. None if the steps are too large to run here, or cannot run.
    """
    if recipe.hardware.tflops is not None:
        by_stage = [cost.flops / (recipe.hardware.tflops * 1e12) for _, cost in costs]
        measured_on, load = "", 0.0
    else:
        device = accelerator.device.type
        fits = all(cost.total <= _MOST_BYTES and cost.flops <= _MOST_FLOPS.get(device, 0.0) for _, cost in costs)
        # Compiling takes longer than the steps, and a teacher would need its weights.
        if not fits or recipe.train.compile or recipe.train.needs_teacher or recipe.hardware.count > 1:
            return None
        load = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0
        try:
            by_stage = _timed(recipe, tokenizer, plan, hybrid, base, accelerator)
        except SurgeryError:  # the run would report it, with its own weights
            return None
        measured_on = device
    steps = [stage.num_steps * recipe.arms_of(stage) for stage, _ in costs]
    seconds = sum(step * n for step, n in zip(by_stage, steps, strict=True))
    return {"seconds": seconds, "step": max(by_stage), "measured_on": measured_on, "load": load}


def _timed(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan,
    hybrid: Build,
    base: Build,
    accelerator: Accelerator,
) -> list[float]:
    """Train a few steps of every stage with random weights. Return the seconds of a step, by stage."""
    short = {"steps": STEPS, "tokens": None, "plateau": None}
    train = recipe.train.model_copy(update={"check_every": None, "trackers": ()})
    if train.stages:
        train = train.model_copy(update={"stages": tuple(stage.model_copy(update=short) for stage in train.stages)})
    else:
        train = train.model_copy(update=short)
    frozen = _random(base()).to(accelerator.device) if "base.logits" in train.needs else None
    history = train_model(_random(hybrid()), tokenizer, train, plan, frozen, recipe.seed, None, accelerator)
    entries = [history[i : i + STEPS] for i in range(0, len(history), STEPS)]
    return [statistics.median(entry["seconds"] for entry in stage[1:]) for stage in entries]


def _random(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model on the meta device small random weights on the CPU."""
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02, generator=generator)
        for buffer in model.buffers():
            buffer.zero_()
    return model
