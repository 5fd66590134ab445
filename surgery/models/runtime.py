"""Settings of a loaded model that its checkpoint does not store: precision, mode, `requires_grad`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel


def stays_in_fp32(model: PreTrainedModel, name: str) -> bool:
    """Return whether a parameter, such as `layers.0.mixer.D`, is fp32 in a model of half precision.

    The class names the parameters by the last parts of their names: `D`, or `gate.weight`.
    """
    return any(f".{name}".endswith(f".{kept}") for kept in model._keep_in_fp32_modules_strict or ())


def run_device() -> torch.device:
    """Return the device that commands run models on: the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Set models to eval mode inside the context, and restore their modes afterwards."""
    modes = [model.training for model in models]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for model, mode in zip(models, modes, strict=True):
            model.train(mode)


@contextmanager
def requires_grad(value: bool, *models: nn.Module) -> Iterator[None]:
    """Set `requires_grad` of all parameters inside the context, and restore it afterwards.

    To compare two models bit by bit, use the same setting for both. It decides how torch multiplies a weight with a
    transposed stream, as in Mamba-1 (at::matmul folds the batch or not), and some CPUs round the two differently.
    """
    changed = [p for model in models for p in model.parameters() if p.requires_grad != value]
    for parameter in changed:
        parameter.requires_grad_(value)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not value)
