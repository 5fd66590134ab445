"""One stage of a training, for tests that look at its gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from surgery.train.sharded import full
from surgery.train.trainer import StageTrainer


def record_gradients(trainer: StageTrainer) -> dict[str, Tensor]:
    """By name, filled in every step before clipping; clipping changes nothing."""
    gradients: dict[str, Tensor] = {}

    def record(parameters: Iterable[Any], norm: float) -> Tensor:
        names = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
        for name, parameter in zip(names, parameters, strict=True):
            if parameter.grad is not None:
                gradients[name] = full(parameter.grad).clone()
        return torch.tensor(1.0)

    trainer.accelerator.clip_grad_norm_ = record  # type: ignore[method-assign]
    return gradients
