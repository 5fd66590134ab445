"""Check torch.compile before a run, and name `train.compile` in its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from surgery.errors import RunError


@contextmanager
def compiling() -> Iterator[None]:
    """Convert errors of the compiler inside to a RunError: no C++ compiler, no Triton, an unsupported graph."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        hint = "It needs a C++ compiler, and Triton on a GPU. Install g++, set CXX, or set train.compile to false."
        raise RunError("train.compile", f"true ({str(error).strip().splitlines()[0][:200]})", hint) from error


def check_compiler(device: torch.device) -> None:
    """Compile one line of code. Raises RunError on failure."""

    def one_line(x: Tensor) -> Tensor:
        return x * 2 + 1

    with compiling():
        torch.compile(one_line)(torch.ones(4, device=device))
