"""Losses of a step, which stay on the device until they are read, so that the host does not wait for a GPU."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from surgery.recipe import TrainStage
from surgery.train.growth import diverged, growing_loss


class StepLosses:
    """Losses, tokens and gradient norm of one step. Starts to copy them to the host.

    Args:
        step: number of the step, from 1, over all stages.
        names: names of the losses.
        losses: (len(names),) weighted losses, means over the processes.
        tokens: number of tokens, without padding, of all processes: a tensor with one number.
        norm: norm of the gradient.

    Attributes:
        seconds: time of the step on the host, set when it is over.
    """

    def __init__(self, step: int, names: Sequence[str], losses: Tensor, tokens: Tensor, norm: Tensor) -> None:
        self.step, self.names, self.seconds = step, names, 0.0
        values = torch.cat([losses, tokens[None].to(losses), norm.detach().reshape(1).to(losses)])
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
    def losses(self) -> Mapping[str, float]:
        """The losses and, first, their sum `loss`. Waits for the step."""
        losses = dict(zip(self.names, self._read, strict=False))
        return {"loss": sum(losses.values()), **losses}

    @property
    def is_finite(self) -> bool:
        """Whether losses and gradient are finite. Waits for the step."""
        return all(map(math.isfinite, self._read))

    def entry(self) -> dict[str, float]:
        """Entry of the step in the history. Waits for the step."""
        return {"step": self.step, **self.losses, "tokens": round(self._read[-2]), "seconds": round(self.seconds, 4)}


class StepLog:
    """The history of a stage, with the steps whose losses were not read yet.

    Args:
        entries: those of all steps so far, earlier stages included; new ones are appended.
        before: number of steps of earlier stages.
        stage: with the weights of the losses.
        vocab_size: of the model.
        folder: folder of checkpoints, which errors name.
    """

    def __init__(
        self, entries: list[dict[str, float]], before: int, stage: TrainStage, vocab_size: int, folder: Path | None
    ) -> None:
        self.entries, self.before, self.stage, self.vocab_size, self.folder = entries, before, stage, vocab_size, folder
        self._unread: deque[StepLosses] = deque()

    @property
    def of_stage(self) -> list[dict[str, float]]:
        """Entries of this stage."""
        return [entry for entry in self.entries if entry["step"] > self.before]

    def add(self, losses: StepLosses) -> None:
        """Append a finished step."""
        self._unread.append(losses)

    def check(self, losses: StepLosses) -> None:
        """Raise TrainingDiverged if losses or gradient are not finite. Waits for the step."""
        if not losses.is_finite:
            raise diverged(self.folder, losses.step, str(losses.losses["loss"]))

    def read(self, keep: int = 0) -> None:
        """Append the entries of all but the last `keep` steps. Raises TrainingDiverged."""
        while len(self._unread) > keep:
            losses = self._unread.popleft()
            self.check(losses)
            self.entries.append(losses.entry())
            if (growing := growing_loss(self.of_stage, self.stage, self.vocab_size)) is not None:
                raise diverged(self.folder, losses.step, growing)
