"""Main memory that training has freed."""

from __future__ import annotations

import platform
import resource
from pathlib import Path

import pytest
import torch

from surgery.models.runtime import trim_heap


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="/proc, and a heap that keeps freed memory")
def test_memory_between_tensors_goes_back_to_the_system() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    kept = [torch.ones(10_000) for _ in range(3000)]  # 120 MB
    del kept[::2]
    before = resident()
    trim_heap()
    assert before - resident() > 30e6  # of 60
