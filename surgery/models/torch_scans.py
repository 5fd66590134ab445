"""Scans in plain PyTorch that take the place of transformers' own where no kernel runs.

The results are those of transformers up to rounding; paper/BENCHMARKS.md has the times. They also keep the documents of
a row separate, which transformers' own PyTorch code refuses.

- Mamba-1: transformers takes each token from tensors of all tokens by index. The gradient of such an index is a tensor
  as large as all tokens, so its backward pass is quadratic in the number of tokens. Ours is in `selective_scan.py`.
- Mamba-2: transformers repeats B and C for every head, computes their products once a head, and combines every chunk
  with every earlier one. Here heads share the products of their group, and the state is carried from chunk to chunk.

Shape legend: B batch, T tokens, H heads of P, G groups, N state width, C channels, K taps of the convolution.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from surgery.hybrid.modeling_hybrid import KERNELS, begins_of, kernels_by_device
from surgery.hybrid.modeling_llamba import chunked_scan
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
    seq_idx: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the scan of arXiv 2405.21060 in chunks, with the arguments of `mamba_ssm.mamba_chunk_scan_combined`.

    The result does not depend on the chunks. So `chunk_size`, which suits kernels, is not used: in chunks of about the
    square root of P N tokens, the scores between tokens take as much memory as the states.

    Args:
        D: (H,), the skip. dt_bias: (H,), added to dt before the softplus. initial_states: (B,H,P,N), zero if None.
        seq_idx: (B,T), the document that each token belongs to, if a row holds several. The state is 0 before each,
            except for the first one.

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
    log_decay_BTH = dt_BTH * _at_least_float32(A_H)
    if seq_idx is not None:
        log_decay_BTH = log_decay_BTH.masked_fill(begins_of(seq_idx)[..., None], -torch.inf)
    if initial_states is None:
        initial_states = x_BTHP.new_zeros(*x_BTHP.shape[::2], P, N)
    y_BTHP, state_BHPN = chunked_scan(
        x_BTHP * dt_BTH[..., None],
        _at_least_float32(B_BTGN),
        _at_least_float32(C_BTGN),
        log_decay_BTH,
        initial_states.to(x_BTHP.dtype),
        2 ** round(math.log2(P * N) / 2),
    )
    if D is not None:
        y_BTHP = y_BTHP + x_BTHP * D[:, None]
    y_BTHP = y_BTHP.contiguous()  # Falcon-H1 calls `view`
    return (y_BTHP, state_BHPN) if return_final_states else y_BTHP


def _at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))  # transformers rounds float64 to float32


def packed_convolution(
    x_BCT: Tensor, weight_CK: Tensor, bias: Tensor | None = None, activation: str | None = None, *, seq_idx: Tensor
) -> Tensor:
    """Run a causal convolution of one filter a channel that does not cross documents, as `causal_conv1d_fn`.

    Args:
        bias: (C,). activation: a name that transformers knows.
        seq_idx: (B,T), the document that each token belongs to.
    """
    T, K = x_BCT.shape[-1], weight_CK.shape[-1]
    y_BCT = x_BCT * weight_CK[:, -1:]
    for back in range(1, min(K, T)):
        same_BT = seq_idx[:, back:] == seq_idx[:, :-back]
        tap_BCT = (x_BCT[..., :-back] * same_BT[:, None]) * weight_CK[:, K - 1 - back, None]
        y_BCT = y_BCT + F.pad(tap_BCT, (back, 0))
    if bias is not None:
        y_BCT = y_BCT + bias[:, None]
    return (y_BCT if activation is None else ACT2FN[activation](y_BCT)).to(x_BCT.dtype)


def choose_by_device(*models: PreTrainedModel) -> list[ModuleType]:
    """Choose kernels or PyTorch by device in all modelling files of these models, and return these files."""
    classes = {type(module) for model in models for module in model.modules()}
    return kernels_by_device(*classes)


_SCANS: dict[str, Scan] = {"mamba_selective_scan": selective_scan, "mamba2_chunk_scan": chunk_scan}


@contextmanager
def torch_scans(*models: PreTrainedModel | None) -> Iterator[None]:
    """Use these scans in `models` inside the context, unless a kernel or `torch.compile` has a faster one.

    A kernel is faster for CUDA tensors. The scans take the place of functions of transformers, so other models of the
    same class that run inside the context use them too.
    """
    given = [model for model in models if model is not None]
    has_own = any(getattr(model.config, "use_mambapy", False) for model in given)
    replaced = []
    try:
        for file in choose_by_device(*given):
            for name, ours in () if has_own else _scans_of(file):
                stock = getattr(file, name)
                if hasattr(stock, "has_kernel"):  # chosen by device, and not replaced yet
                    replaced.append((file, name, stock))
                    setattr(file, name, _instead_of(stock, ours))
        yield
    finally:
        for file, name, stock in replaced:
            setattr(file, name, stock)


def code_text(model: PreTrainedModel, device: torch.device, compiled: bool = False) -> str:
    """Describe in one line which code runs the recurrences and convolutions of a model in locating and training.

    Args:
        model: possibly on the meta device.
        device: the one that the model will run on.
        compiled: whether it is compiled by torch.compile.

    Returns:
        The line; empty for a model without a recurrence of transformers.
    """
    files = choose_by_device(model)
    scan = next((name for file in files for name in _SCANS if hasattr(file, name)), None)
    if scan is None:
        return ""
    stock = "transformers'" if compiled or getattr(model.config, "use_mambapy", False) else "this library's"
    parts = [("scan", scan, stock), ("convolution", "causal_conv1d_fn", "transformers'")]
    return f"on {device.type}: " + "; ".join(
        f"{part} by {_code_of(name, owner, device)}" for part, name, owner in parts
    )


@cache
def missing_kernel(name: str) -> str | None:
    """Return why a function has no kernel, and what to install, in one line; None if it has one.

    Args:
        name: a key of `KERNELS`.
    """
    for module in KERNELS[name]:
        package = module.partition(".")[0]
        command = f"pip install --no-build-isolation {package.replace('_', '-')}"
        try:
            import_module(module)
        except Exception as error:  # a package that was built for another torch raises any
            if find_spec(package) is None:
                return f"{package} is not installed: {command}"
            reason = " ".join(str(error).split())[:120]
            again = command.replace("install", "install --force-reinstall --no-deps", 1)
            return f"{package} cannot be imported ({type(error).__name__}: {reason}): {again}"
    return None


def _code_of(name: str, owner: str, device: torch.device) -> str:
    """Name the kernels that a function of transformers runs on a device, or the PyTorch code and what is missing."""
    if device.type != "cuda":
        return f"{owner} PyTorch code"
    missing = missing_kernel(name)
    if missing is not None:
        return f"{owner} PyTorch code ({missing})"
    package = KERNELS[name][0].partition(".")[0]
    return f"kernels of {package} {getattr(sys.modules[package], '__version__', '')}".rstrip()


def _scans_of(file: ModuleType) -> list[tuple[str, Scan]]:
    """Return our functions for a modelling file. The scan of Mamba-1 does not separate documents, so its convolution
    keeps refusing `seq_idx`.
    """
    scans = [(name, ours) for name, ours in _SCANS.items() if hasattr(file, name)]
    packs = any(name == "mamba2_chunk_scan" for name, _ in scans)
    return [*scans, ("causal_conv1d_fn", packed_convolution)] if packs else scans


def _instead_of(stock: Any, ours: Scan) -> Scan:
    known = signature(ours).parameters  # as in transformers, arguments that only kernels know are left out
    has_kernel, packed_only = stock.has_kernel, ours is packed_convolution

    def scan(tensor: Tensor, *given: Any, **named: Any) -> Any:
        packed = named.get("seq_idx") is not None
        by_kernel = has_kernel and tensor.is_cuda
        if by_kernel or (not packed and (packed_only or torch.compiler.is_compiling())):
            return stock(tensor, *given, **named)
        return ours(tensor, *given, **{name: value for name, value in named.items() if name in known})

    return scan
