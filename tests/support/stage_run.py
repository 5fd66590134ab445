"""One stage of a training as an object, for tests that look at it before and after."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.recipe import Train
from surgery.train.preparing import PreparedStage, prepare_stage
from surgery.train.sharded import full
from surgery.train.targets import Targets
from surgery.train.trainer import OnStep, StageResult, train_stage


@dataclass
class StageRun:
    """The arguments of `train_stage`, and its result once `run` has returned."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    section: Train
    seed: int
    folder: Path | None
    accelerator: Accelerator
    targets: Targets = field(default_factory=Targets)
    on_step: OnStep | None = None
    result: StageResult | None = None

    def run(self) -> list[dict[str, float]]:
        """Train the stage; its history."""
        given = (self.model, self.tokenizer, self.section, self.seed, self.accelerator, self.targets)
        self.result = train_stage(*given, folder=self.folder, on_step=self.on_step)
        return self.result.history

    def prepare(self) -> PreparedStage:
        """Everything before the first step."""
        given = (self.model, self.tokenizer, self.section, self.seed, self.accelerator, self.targets)
        return prepare_stage(*given)

    @property
    def history(self) -> list[dict[str, float]]:
        assert self.result is not None
        return self.result.history

    def record_gradients(self) -> dict[str, Tensor]:
        """By name, filled in every step before clipping; clipping changes nothing."""
        gradients: dict[str, Tensor] = {}

        def record(parameters: Iterable[Any], norm: float) -> Tensor:
            names = [name for name, p in self.model.named_parameters() if p.requires_grad]
            for name, parameter in zip(names, parameters, strict=True):
                if parameter.grad is not None:
                    gradients[name] = full(parameter.grad).clone()
            return torch.tensor(1.0)

        self.accelerator.clip_grad_norm_ = record  # type: ignore[method-assign]
        return gradients
