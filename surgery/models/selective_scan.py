"""Mamba-1's scan in plain PyTorch, forward and backward, in memory that grows little with the number of tokens.

Autograd would keep several tensors of (B,T,I,N) numbers. Here the states of one part of the tokens exist at a time: the
forward pass keeps the state before each part, and the backward pass computes the states of a part again.

Shape legend: B batch, I inner width, T tokens, N state width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_PART = 2**19  # numbers in the states of one part: they fit in a CPU's cache


def selective_scan(
    x_BIT: Tensor,
    dt_BIT: Tensor,
    A_IN: Tensor,
    B_BNT: Tensor,
    C_BNT: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the scan of arXiv 2312.00752 token by token, with the arguments of `mamba_ssm.selective_scan_fn`.

    States are float32, or float64 if `x_BIT` is. The gradient cannot be differentiated again.

    Args:
        D: (I,), the skip. z: (B,I,T), the gate. delta_bias: (I,), added to dt before the softplus.

    Returns:
        (B,I,T) in the precision of `x_BIT`, and with `return_last_state` the state (B,I,N) after the last token.
    """
    if delta_bias is not None:
        dt_BIT = dt_BIT + delta_bias.to(dt_BIT.dtype)[:, None]
    if delta_softplus:
        dt_BIT = F.softplus(dt_BIT)
    precision = torch.promote_types(x_BIT.dtype, torch.float32)
    x, dt, B, C = (v.to(precision).permute(2, 0, 1).contiguous() for v in (x_BIT, dt_BIT, B_BNT, C_BNT))
    y_TBI, state_BIN = _Scan.apply(x, dt, A_IN.to(precision), B, C)
    y_BIT = y_TBI.permute(1, 2, 0).to(x_BIT.dtype)
    if D is not None:
        y_BIT = y_BIT + x_BIT * D[:, None]
    if z is not None:
        y_BIT = y_BIT * F.silu(z)
    return (y_BIT, state_BIN) if return_last_state else y_BIT


class _Scan(torch.autograd.Function):
    """h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] B[t] and y[t] = h[t] C[t], for x, dt (T,B,I), A (I,N), B, C (T,B,N)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
        """Return y (T,B,I) and the last state (B,I,N)."""
        state, y, before = x.new_zeros(*x.shape[1:], A.shape[1]), torch.empty_like(x), []
        ctx.length = max(1, _PART // state.numel())
        for start in range(0, len(x), ctx.length):
            part = slice(start, start + ctx.length)
            if any(ctx.needs_input_grad):
                before.append(state)
            _, h = _states(dt[part], x[part], A, B[part], state)
            y[part], state = (h @ C[part, ..., None]).squeeze(-1), h[-1].clone()
        ctx.save_for_backward(x, dt, A, B, C, *before)
        return y, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dh: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of x, dt, A, B and C. `dh` is that of the state after the tokens of a part."""
        x, dt, A, B, C, *before = ctx.saved_tensors
        dx, ddt, dB, dC = (torch.empty_like(v) for v in (x, dt, B, C))
        dA = torch.zeros_like(A)
        for number in reversed(range(len(before))):
            part = slice(number * ctx.length, (number + 1) * ctx.length)
            decays, h = _states(dt[part], x[part], A, B[part], before[number])
            dC[part] = (dy[part, :, None] @ h).squeeze(-2)
            d = dy[part, ..., None] * C[part, :, None]  # of the states
            d[-1] += dh
            for t in range(len(d) - 2, -1, -1):
                d[t].addcmul_(decays[t + 1], d[t + 1])
            dh = decays[0] * d[0]
            put = (d @ B[part, ..., None]).squeeze(-1)  # of dt x
            dx[part] = put * dt[part]
            dB[part] = ((dt[part] * x[part])[:, :, None] @ d).squeeze(-2)
            decays *= d  # now the gradient of dt A
            decays[1:] *= h[:-1]
            decays[0] *= before[number]
            ddt[part] = torch.mul(decays, A, out=d).sum(-1).addcmul_(put, x[part])
            if ctx.needs_input_grad[2]:  # not while the base is frozen
                dA += decays.mul_(dt[part, ..., None]).sum((0, 1))
        return dx, ddt, dA, dB, dC


def _states(dt: Tensor, x: Tensor, A: Tensor, B: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the decays and the states (T,B,I,N) of a part of the tokens that begins after `state` (B,I,N)."""
    decays = (dt[..., None] * A).exp_()
    states = (dt * x)[..., None] * B[:, :, None]
    for decay, new in zip(decays, states, strict=True):
        state = new.addcmul_(decay, state)
    return decays, states
