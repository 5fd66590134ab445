"""Read the losses of the steps, append them to the history, and stop a training that diverges.

Losses stay on the device until they are read, so that the host does not wait for a GPU.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from surgery.errors import TrainingDiverged
from surgery.recipe import TrainStage
from surgery.recipe.objectives import OBJECTIVES
from surgery.train.checkpoints import checkpoints

_WINDOW = 20  # steps that all have to be high
_FEW = 3  # steps in the mean that is compared with uniform guessing


class StepLosses:
    """Losses, tokens and gradient norm of one step. They are copied to the host, and waited for when they are read.

    Args:
        step: number of the step, from 1, over all stages.
        names: names of the losses.
        values: (len(names) + 2,) weighted losses, number of tokens without padding, and norm of the gradient. They are
            those of all processes.

    Attributes:
        seconds: time of the step on the host, set when it is over.
    """

    def __init__(self, step: int, names: Sequence[str], values: Tensor) -> None:
        self.step, self.names, self.seconds = step, names, 0.0
        self._values, self._copied = values.to("cpu", non_blocking=True), None
        if values.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    @cached_property
    def _read(self) -> list[float]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, self._read))

    def entry(self) -> dict[str, float]:
        """Entry of the step in the history, with the sum of the losses as `loss`."""
        *losses, tokens, _ = self._read
        named = dict(zip(self.names, losses, strict=True))
        total = {"step": self.step, "loss": sum(losses)}
        return {**total, **named, "tokens": round(tokens), "seconds": round(self.seconds, 4)}


@dataclass
class StepLog:
    """The history of a stage, with the steps whose losses were not read yet."""

    entries: list[dict[str, float]]  # of all steps so far, earlier stages included; new ones are appended
    before: int  # number of steps of earlier stages
    stage: TrainStage
    vocab_size: int
    folder: Path | None  # of checkpoints, which errors name
    _unread: deque[StepLosses] = field(default_factory=deque)

    @property
    def of_stage(self) -> list[dict[str, float]]:
        # A control has no entries of the stages that it skips.
        return self.entries[bisect_right(self.entries, self.before, key=lambda entry: int(entry["step"])) :]

    def add(self, losses: StepLosses) -> None:
        self._unread.append(losses)

    def check(self, losses: StepLosses) -> None:
        """Raise TrainingDiverged if losses or gradient are not finite. Waits for the step."""
        if not losses.is_finite:
            raise diverged(self.folder, losses.step, str(losses.entry()["loss"]))

    def read(self, keep: int = 0) -> None:
        """Append the entries of all but the last `keep` steps. Raises TrainingDiverged."""
        while len(self._unread) > keep:
            losses = self._unread.popleft()
            self.check(losses)
            self.entries.append(losses.entry())
            if (growing := growing_loss(self.of_stage, self.stage, self.vocab_size)) is not None:
                raise diverged(self.folder, losses.step, growing)


def diverged(folder: Path | None, step: int, loss: str) -> TrainingDiverged:
    """Error for a loss that has grown or is not finite. Its hint names the newest checkpoint in `folder`."""
    saved = checkpoints(folder) if folder is not None else []
    last = f"The last good checkpoint is {saved[-1].name}." if saved else "No checkpoint was saved yet."
    hint = f"{last} Lower train.optimizer.lr and new_heads_lr, increase warmup, or check the data."
    return TrainingDiverged(f"train step {step}", f"loss {loss}", hint)


def growing_loss(history: Sequence[Mapping[str, float]], stage: TrainStage, vocab_size: int) -> str | None:
    """Name the objective whose loss has grown, with its loss; None if no loss has.

    Later steps are compared with the first step, whose loss is that of the untrained weights. Documents differ in
    difficulty, so a loss counts as grown in two cases only. Losses are in nats per token:

    - Worse than uniform guessing: the mean of the last three steps is above log(vocabulary) and above twice the loss of
      the first step. Missing steps count as 0, so a single loss above three times this bound is enough.
    - Never as low as at the start: each of the last 20 steps is more than one nat above twice the loss of the first.

    The second case needs constant weights, since sources differ in difficulty. An objective that starts at zero, such
    as `base_kl`, is expected to grow, so only the first case applies. Objectives without `in_nats` are not checked.
    """
    for name, objective in OBJECTIVES.items():
        if not objective.in_nats:
            continue
        scale = stage.distil.temperature**2 if objective.uses_temperature else 1.0
        first = _nats(history, 0, stage, name)
        recent = (_nats(history, i, stage, name) for i in range(max(1, len(history) - _WINDOW), len(history)))
        later = [loss for loss in recent if loss is not None]
        bound = max(2 * (first or 0.0), scale * math.log(vocab_size))
        if sum(later[-_FEW:]) > _FEW * bound:
            return _message(name, max(later[-_FEW:]), first)
        weights = [(source.weights.at(0.0).get(name), source.weights.at(1.0).get(name)) for source in stage.sources]
        if first is None or objective.starts_at_zero or any(begin != end for begin, end in weights):
            continue
        if len(later) == _WINDOW and min(later) > 2 * first + scale:
            return _message(name, later[-1], first)
    return None


def _message(name: str, loss: float, first: float | None) -> str:
    return f"{loss:.3g} for {name}, {first or 0.0:.3g} in the first step"


def _nats(history: Sequence[Mapping[str, float]], step: int, stage: TrainStage, name: str) -> float | None:
    """Loss of an objective at a step, divided by its weights. None if it has no weight."""
    if name not in history[step]:
        return None
    progress = step / max(1, stage.num_steps - 1)
    weight = sum(source.weights.at(progress).get(name, 0.0) for source in stage.sources)
    return history[step][name] / weight if weight else None
