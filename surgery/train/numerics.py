"""Precision of matrix products, and torch.compile. Weights that train are fp32 in any case."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from accelerate import Accelerator
from torch import nn

from surgery.errors import RunError, summary
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


@contextmanager
def compiling() -> Iterator[None]:
    """Convert errors of the compiler inside to a RunError: no C++ compiler, no Triton, an unsupported graph."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        hint = "It needs a C++ compiler, and Triton on a GPU. Install g++, set CXX, or set train.compile to false."
        raise RunError("train.compile", f"true ({summary(error)})", hint) from error


def check_compiler(device: torch.device) -> None:
    """Compile one line of code. Raises RunError on failure."""
    with compiling():
        torch.compile(lambda x: x * 2 + 1)(torch.ones(4, device=device))
