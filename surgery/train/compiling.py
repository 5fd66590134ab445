"""torch.compile: tries it before anything is measured, and names `train.compile` where it does not work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from surgery.errors import RunError


@contextmanager
def compiling() -> Iterator[None]:
    """Raises RunError in the place of the compiler's own errors: no C++ compiler, no Triton, a graph it refuses."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        hint = "It needs a C++ compiler (and Triton on a GPU): install g++ or name one in CXX, or set it to false."
        raise RunError("train.compile", f"true ({str(error).strip().splitlines()[0][:200]})", hint) from error


def check_compiler(device: torch.device) -> None:
    """Compiles one line. Raises RunError where that fails."""
    with compiling():
        torch.compile(_one_line)(torch.ones(4, device=device))


def _one_line(x: Tensor) -> Tensor:
    return x * 2 + 1
