"""Stand-ins in plain torch for the kernels of mamba_ssm and causal_conv1d that take `seq_idx`.

They replace the functions that transformers' modelling files call, and compute in the dtype of their arguments.

    with_kernels(monkeypatch)                        every Mamba-2 family, with the fused training function
    with_kernels(monkeypatch, reset_state=False)     a faulty kernel: the state of one document reaches the next

Shape legend: B rows, T tokens, C channels, H heads, P head width, G groups, N state width; S as T, the token that
is read.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.bamba import modeling_bamba
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.granitemoehybrid import modeling_granitemoehybrid
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.zamba2 import modeling_zamba2

_FILES = (
    modeling_bamba,
    modeling_falcon_h1,
    modeling_granitemoehybrid,
    modeling_mamba2,
    modeling_nemotron_h,
    modeling_zamba2,
)


class OnCuda(Tensor):
    """A tensor on the CPU that says it is on a CUDA device."""

    is_cuda = True  # type: ignore[assignment]


_ACTIVATIONS = {None: lambda x: x, "silu": F.silu, "swish": F.silu}


def convolution(
    x_BCT: Tensor,
    weight_CK: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    reset: bool = True,
    **_: Any,
) -> Tensor:
    """causal_conv1d_fn: one tap after the other, each on the tokens that have one of their document so far back."""
    T, K = x_BCT.shape[-1], weight_CK.shape[-1]
    out = torch.zeros_like(x_BCT) if bias is None else bias[:, None].expand(x_BCT.shape)
    for back in range(min(K, T)):
        tap = weight_CK[:, K - 1 - back, None] * F.pad(x_BCT, (back, 0))[..., :T]
        if seq_idx is not None and reset:
            same = seq_idx[:, back:] == seq_idx[:, : T - back]
            tap = tap * F.pad(same, (back, 0))[:, None]
        out = out + tap
    return _ACTIVATIONS[activation](out)


def scan(
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    A_H: Tensor,
    B_BTGN: Tensor,
    C_BTGN: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    reset: bool = True,
    **_: Any,
) -> Any:
    """mamba_chunk_scan_combined, as one product over pairs of tokens; a document reads its own tokens only.

    For training: a final state that is asked for is None.
    """
    assert initial_states is None, "these stand-ins are for training"
    dt = dt_BTH if dt_bias is None else dt_BTH + dt_bias
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    repeats = x_BTHP.shape[2] // B_BTGN.shape[2]
    B, C = (v.repeat_interleave(repeats, dim=2) for v in (B_BTGN, C_BTGN))
    T = x_BTHP.shape[1]
    later_TS = torch.ones(T, T, dtype=torch.bool).tril(-1)
    # Each sum begins at its token S, so that its rounding does not depend on the tokens before S.
    step_BHTS = (dt * A_H).transpose(1, 2)[..., None].masked_fill(~later_TS, 0.0)
    reads_BHTS = later_TS.logical_or(torch.eye(T, dtype=torch.bool))
    if seq_idx is not None and reset:
        reads_BHTS = reads_BHTS & (seq_idx[:, :, None] == seq_idx[:, None])[:, None]
    decay_BHTS = step_BHTS.cumsum(-2).exp() * reads_BHTS
    weights_BHTS = torch.einsum("bthn,bshn->bhts", C, B) * decay_BHTS
    y = torch.einsum("bhts,bshp->bthp", weights_BHTS, dt[..., None] * x_BTHP).contiguous()
    y = y if D is None else y + D[:, None] * x_BTHP
    return (y, None) if return_final_states else y


def fused(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    activation: str,
    rmsnorm_weight: Tensor | None,
    rmsnorm_eps: float | None,
    outproj_weight: Tensor,
    outproj_bias: Tensor | None,
    headdim: int,
    ngroups: int,
    dt_limit: tuple[float, float],
    seq_idx: Tensor | None = None,
    reset_state: bool = True,
    reset_convolution: bool = True,
    **_: Any,
) -> Tensor:
    """mamba_split_conv1d_scan_combined: what a mixer does in training between its two projections, and the second."""
    inner, heads = outproj_weight.shape[1], D.shape[0]
    gate, mixed, dt = zxbcdt.split([inner, conv1d_weight.shape[0], heads], dim=-1)
    mixed = convolution(mixed.transpose(1, 2), conv1d_weight, conv1d_bias, activation, seq_idx, reset_convolution)
    x, B, C = mixed.transpose(1, 2).split([inner, *[(mixed.shape[1] - inner) // 2] * 2], dim=-1)
    x, B, C = (v.unflatten(-1, (n, -1)) for v, n in ((x, heads), (B, ngroups), (C, ngroups)))
    given: dict[str, Any] = {"D": D, "dt_bias": dt_bias, "dt_softplus": True, "dt_limit": dt_limit}
    y = scan(x, dt, A, B, C, chunk_size, seq_idx=seq_idx, reset=reset_state, **given).flatten(2)
    y = y * F.silu(gate)
    if rmsnorm_weight is not None:
        grouped = y.unflatten(-1, (ngroups, -1))
        y = (grouped * (grouped.pow(2).mean(-1, keepdim=True) + rmsnorm_eps).rsqrt()).flatten(-2) * rmsnorm_weight
    return F.linear(y, outproj_weight, outproj_bias)


def with_kernels(
    monkeypatch: pytest.MonkeyPatch, reset_state: bool = True, reset_convolution: bool = True, fuses: bool = True
) -> None:
    """Puts the stand-ins where transformers' own functions are; one that does not reset is a kernel that leaks."""
    instead: dict[str, Any] = {
        "causal_conv1d_fn": partial(convolution, reset=reset_convolution),
        "mamba2_chunk_scan": partial(scan, reset=reset_state),
    }
    if fuses:
        given = {"reset_state": reset_state, "reset_convolution": reset_convolution}
        instead["mamba2_split_conv1d_scan_combined"] = partial(fused, **given)
    else:
        instead["mamba2_split_conv1d_scan_combined"] = lambda *_, **__: None
    for file in _FILES:
        for name, function in instead.items():
            assert hasattr(file, name)
            monkeypatch.setattr(file, name, function)
