"""Errors of a device without memory."""

from __future__ import annotations

from typing import Any

import torch

NO_MEMORY = (
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
)


def failing(error: Exception) -> Any:
    def forward(*given: Any, **named: Any) -> None:
        raise error

    return forward
