"""Scans in plain PyTorch that take the place of transformers' own where no kernel runs.

The results are those of transformers up to rounding; docs/BENCHMARKS.md has the times.

- Mamba-1: transformers takes each token from tensors of all tokens by index. The gradient of such an index is a tensor
  as large as all tokens, so its backward pass is quadratic in the number of tokens. Ours is in `selective_scan.py`.
- Mamba-2: transformers repeats B and C for every head, computes their products once a head, and combines every chunk
  with every earlier one. Here heads share the products of their group, and the state is carried from chunk to chunk.

Shape legend: B batch, T tokens, H heads of P, G groups, N state width.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from inspect import signature
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from surgery.hybrid.discrete_scan import chunked_scan
from surgery.models.selective_scan import selective_scan

Scan = Callable[..., Any]


def chunk_scan(
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    A_H: Tensor,
    B_BTGN: Tensor,
    C_BTGN: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the scan of arXiv 2405.21060 in chunks, with the arguments of `mamba_ssm.mamba_chunk_scan_combined`.

    The result does not depend on the chunks. So `chunk_size`, which suits kernels, is not used: in chunks of about the
    square root of P N tokens, the scores between tokens take as much memory as the states.

    Args:
        D: (H,), the skip. dt_bias: (H,), added to dt before the softplus. initial_states: (B,H,P,N), zero if None.

    Returns:
        (B,T,H,P) in float32, or in float64 if `x_BTHP` is, and with `return_final_states` the state (B,H,P,N) after the
        last token.
    """
    if dt_bias is not None:
        dt_BTH = dt_BTH + dt_bias.to(dt_BTH.dtype)
    if dt_softplus:
        dt_BTH = F.softplus(dt_BTH)
    dt_BTH, x_BTHP = _at_least_float32(dt_BTH.clamp(*dt_limit)), _at_least_float32(x_BTHP)
    P, N = x_BTHP.shape[-1], B_BTGN.shape[-1]
    if initial_states is None:
        initial_states = x_BTHP.new_zeros(*x_BTHP.shape[::2], P, N)
    y_BTHP, state_BHPN = chunked_scan(
        x_BTHP * dt_BTH[..., None],
        _at_least_float32(B_BTGN),
        _at_least_float32(C_BTGN),
        dt_BTH * _at_least_float32(A_H),
        initial_states.to(x_BTHP.dtype),
        2 ** round(math.log2(P * N) / 2),
    )
    if D is not None:
        y_BTHP = y_BTHP + x_BTHP * D[:, None]
    y_BTHP = y_BTHP.contiguous()  # Falcon-H1 calls `view`
    return (y_BTHP, state_BHPN) if return_final_states else y_BTHP


def _at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))  # transformers rounds float64 to float32


_SCANS: dict[str, Scan] = {"mamba_selective_scan": selective_scan, "mamba2_chunk_scan": chunk_scan}


@contextmanager
def torch_scans(*models: PreTrainedModel | None) -> Iterator[None]:
    """Use these scans in `models` inside the context, unless a kernel or `torch.compile` has a faster one.

    They take the place of functions of transformers, so other models of the same class that run inside the context use
    them too.
    """
    given = [model for model in models if model is not None]
    classes = {cls for model in given for module in model.modules() for cls in type(module).__mro__}
    files = {cls.__module__ for cls in classes if cls.__module__.startswith("transformers.models.")}
    has_own = find_spec("mamba_ssm") is not None or any(getattr(m.config, "use_mambapy", False) for m in given)
    replaced = []
    try:
        for file, name in () if has_own else product(sorted(files), _SCANS):
            stock = getattr(sys.modules[file], name, None)
            if getattr(stock, "__module__", None) == file:  # transformers' own, and not replaced yet
                replaced.append((sys.modules[file], name, stock))
                setattr(sys.modules[file], name, _instead_of(stock, _SCANS[name]))
        yield
    finally:
        for module, name, stock in replaced:
            setattr(module, name, stock)


def _instead_of(stock: Any, ours: Scan) -> Scan:
    known = signature(ours).parameters  # as in transformers, arguments that only kernels know are left out

    def scan(*given: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or named.get("seq_idx") is not None:
            return stock(*given, **named)
        return ours(*given, **{name: value for name, value in named.items() if name in known})

    return scan
