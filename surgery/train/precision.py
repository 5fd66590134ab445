"""Precision of matrix products in training. Weights that train are fp32 in any case."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate import Accelerator
from torch import nn

from surgery.recipe import Train
from surgery.recipe.train import Precision


def precision_of(section: Train, model: nn.Module) -> Precision:
    """Return the precision of matrix products: the recipe's, and always `bf16` for a model in half precision."""
    is_half = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in model.parameters())
    return "bf16" if is_half else section.precision


def autocast(precision: Precision, accelerator: Accelerator) -> AbstractContextManager[None]:
    """Context manager for matrix products in this precision."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(accelerator.device.type, torch.bfloat16)  # type: ignore[return-value]
