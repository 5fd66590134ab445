"""Mamba-1's scan in C in the place of `surgery.models.selective_scan`, for arms of a Mamba-1 in half the time.

It computes the same formula, with the errors of fp32 in another order: an arm reaches another accuracy than with the
library's scan, as with another seed (paper/HEAD_CHOICE.md has an example).
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from surgery.errors import RunError
from surgery.models import selective_scan

SOURCE = Path(__file__).with_name("scan.c")
FLAGS = ("-O3", "-march=native", "-ffast-math", "-fPIC")


@contextmanager
def compiled_scan() -> Iterator[None]:
    """Run Mamba-1's scan in C inside the context, on one thread and in fp32.

    Raises:
        RunError: there is no C compiler.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise RunError("--compiled-scan", "cc", "There is no C compiler. Install gcc, or leave the option out.")
    given = selective_scan._Scan
    with TemporaryDirectory() as folder:
        compiled, library = Path(folder) / "scan.o", Path(folder) / "scan.so"
        subprocess.run([compiler, *FLAGS, "-c", str(SOURCE), "-o", str(compiled)], check=True)
        # Linked without -ffast-math: a library linked with it flushes denormal numbers to zero in the whole process.
        subprocess.run([compiler, "-shared", str(compiled), "-o", str(library), "-lm"], check=True)
        selective_scan._Scan = _scan_of(ctypes.CDLL(str(library)))  # type: ignore[assignment, misc]
        try:
            yield
        finally:
            selective_scan._Scan = given  # type: ignore[misc]


def _call(function: Any, tensors: Sequence[Tensor], sizes: Sequence[int]) -> None:
    assert all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
    function(*(ctypes.c_void_p(t.data_ptr()) for t in tensors), *map(ctypes.c_long, sizes))


def _scan_of(library: ctypes.CDLL) -> type[torch.autograd.Function]:
    class Scan(torch.autograd.Function):
        """As `selective_scan._Scan`, for x, dt (T,R,I), A (I,N), B, C (T,R,N)."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
            x, dt = (v.permute(1, 2, 0).contiguous() for v in (x, dt))
            B, C = (v.transpose(0, 1).contiguous() for v in (B, C))
            A, y = A.contiguous(), torch.empty_like(x)
            last = x.new_empty(*x.shape[:2], A.shape[1])
            _call(library.forward, (x, dt, A, B, C, y, last), (*x.shape, A.shape[1]))
            ctx.save_for_backward(x, dt, A, B, C)
            return y.permute(2, 0, 1), last

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dy: Tensor, dlast: Tensor) -> tuple[Tensor, ...]:
            x, dt, A, B, C = ctx.saved_tensors
            dy, dh = dy.permute(1, 2, 0).contiguous(), dlast.clone(memory_format=torch.contiguous_format)
            dx, ddt = torch.empty_like(x), torch.empty_like(dt)
            dA, dB, dC = (torch.zeros_like(v) for v in (A, B, C))
            buffers = [x.new_empty(x.shape[2] + 1, A.shape[1]) for _ in range(2)]
            _call(library.backward, (x, dt, A, B, C, dy, dh, dx, ddt, dA, dB, dC, *buffers), (*x.shape, A.shape[1]))
            return dx.permute(2, 0, 1), ddt.permute(2, 0, 1), dA, dB.transpose(0, 1), dC.transpose(0, 1)

    return Scan
