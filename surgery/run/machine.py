"""The device that a run on this machine uses."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import psutil
import torch

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """The device that a run uses."""

    name: str  # of the GPU, or the number of CPU cores
    memory: int  # free bytes
    count: int  # of GPUs
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
    return Machine(f"{cores} CPU core{'s' if cores > 1 else ''}", psutil.virtual_memory().available, 1, False)
