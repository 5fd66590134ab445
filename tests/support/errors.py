"""What an error says, and errors of a device without memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

NO_MEMORY = (
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
)


@contextmanager
def refused(error: type[Exception], *words: str) -> Iterator[None]:
    """Expect an error of one line that holds all these words."""
    with pytest.raises(error) as caught:
        yield
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def failing(error: Exception) -> Any:
    def forward(*given: Any, **named: Any) -> None:
        raise error

    return forward
