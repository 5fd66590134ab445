"""Choose the settings of a recipe that follow from the size of the base, and describe the machine."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from surgery.errors import SurgeryError, is_out_of_memory
from surgery.locate.locating import peak_bytes

GIB = 2**30
SMALL = 10_000_000  # weights: below, everything trains and is measured in minutes on a CPU
_LARGE = 3_000_000_000  # weights: from here on, half precision and new heads alone

# Steps by weights: for small bases as measured here (docs/your-model.md), otherwise of the shipped recipes.
STEPS = ((SMALL, 500), (1_000_000_000, 400), (_LARGE, 800))
STEPS_OF_NEW_HEADS = 400


@dataclass(frozen=True)
class Machine:
    """The device that a run uses.

    Attributes:
        name: of the GPU, or the number of CPU cores.
        memory: bytes that are free on it.
        count: number of GPUs.
        on_gpu: whether it is a GPU.
    """

    name: str
    memory: int
    count: int
    on_gpu: bool

    @property
    def memory_gib(self) -> float:
        """Free memory in GiB, rounded down to one digit."""
        return max(0.1, math.floor(self.memory / GIB * 10) / 10)


def find_machine() -> Machine:
    """Describe the GPU if there is one, otherwise the CPU."""
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return Machine(torch.cuda.get_device_name(), free, torch.cuda.device_count(), True)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(f"{cores} CPU core{'s' if cores > 1 else ''}", _free_memory(), 1, False)


def _free_memory() -> int:
    """Bytes of main memory that a process can still use."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def num_steps(parameters: int, new_heads_only: bool = False) -> int:
    """Training steps of the recipe for this size."""
    if new_heads_only:
        return STEPS_OF_NEW_HEADS
    return next((steps for size, steps in STEPS if parameters <= size), STEPS[-1][1])


def is_large(parameters: int) -> bool:
    """Whether the base is kept in half precision, and only new heads train."""
    return parameters >= _LARGE


def try_batch_sizes(run: Callable[[int], None], room: int, largest: int = 64) -> tuple[int, dict[int, float]]:
    """Find the batch size with the most prompts a second that fits the memory.

    Doubles the size from 4. Stops where memory runs out, where the next size would take more than `room` by the growth
    so far, or where the rate grows by less than a tenth.

    Args:
        run: runs one batch of this size.
        room: bytes that may be used in addition.
        largest: largest size to try.

    Returns:
        The size, and prompts a second by size.

    Raises:
        SurgeryError: not even the smallest batch fits.
    """
    speeds: dict[int, float] = {}
    size, before = 4, peak_bytes()
    run(1)  # the first pass also initialises libraries
    while size <= largest:
        began = time.perf_counter()
        try:
            run(size)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            break
        speeds[size] = size / (time.perf_counter() - began)
        slower = len(speeds) > 1 and speeds[size] < 1.1 * speeds[size // 2]
        if slower or 2 * (peak_bytes() - before) > room:
            break
        size *= 2
    if not speeds:
        raise SurgeryError("MODEL", "out of memory", "Not even 4 prompts fit. Use a larger machine or a smaller model.")
    return max(speeds, key=lambda n: speeds[n]), speeds
