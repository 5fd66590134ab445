"""The kernels of Mamba-1 on the CPU: vLLM's are for GPUs, or for SSMs with one A for each head.

Shape legend: I inner width, N tokens of all requests, S state size, R requests.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def selective_scan(
    u: Tensor,
    ssm_states: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Run the recurrence token by token, all requests at once (arXiv 2312.00752, algorithm 2).

    Args:
        u, delta, z: (I,N), the input, dt before its bias, and the gate.
        ssm_states: (blocks,I,S), updated in place.
        A: (I,S).
        B, C: (S,N).
        D, delta_bias: (I,).
        query_start_loc: (R+1,), where each request's tokens start.
        cache_indices: (R,), the block of each request.
        has_initial_state: (R,), whether the block holds a state to continue from.

    Returns:
        (I,N), gated.
    """
    dt_NI = delta.float().T if delta_bias is None else delta.float().T + delta_bias.float()
    dt_NI = F.softplus(dt_NI) if delta_softplus else dt_NI
    u_NI, B_NS, C_NS, blocks = u.float().T, B.float().T, C.float().T, cache_indices.long()
    starts, lengths = query_start_loc[:-1].long(), query_start_loc.diff()
    state_RIS = torch.where(has_initial_state[:, None, None], ssm_states[blocks].float(), 0.0)
    y_NI = torch.zeros_like(u_NI)
    for step in range(int(lengths.max())):
        active = (lengths > step).nonzero().flatten()
        token = starts[active] + step
        dt_RI = dt_NI[token]
        added = (dt_RI * u_NI[token])[:, :, None] * B_NS[token][:, None]
        state_RIS[active] = torch.exp(dt_RI[:, :, None] * A) * state_RIS[active] + added
        y_NI[token] = (state_RIS[active] * C_NS[token][:, None]).sum(-1)
    ssm_states[blocks] = state_RIS.to(ssm_states.dtype)
    return ((y_NI + D * u_NI) * F.silu(z.float().T)).T.to(u.dtype)


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    z: Tensor,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    dst_state_batch_indices: Tensor | None = None,
    out: Tensor | None = None,
    **kwargs: Any,
) -> None:
    """Compute one token of every request.

    Args:
        state: (blocks,I,S), updated in place.
        x, dt, z: (R,I).
        A: (I,S).
        B, C: (R,S).
        D, dt_bias: (I,).
        state_batch_indices, dst_state_batch_indices: (R,) or (R,1), the block to read and to write.
        out: (R,I), written in place.
    """
    dt_RI = dt.float() + dt_bias.float()
    dt_RI = F.softplus(dt_RI) if dt_softplus else dt_RI
    state_RIS = state[state_batch_indices.flatten().long()].float() * torch.exp(dt_RI[:, :, None] * A)
    state_RIS += (dt_RI * x.float())[:, :, None] * B.float()[:, None]
    state[dst_state_batch_indices.flatten().long()] = state_RIS.to(state.dtype)
    y_RI = (state_RIS * C.float()[:, None]).sum(-1) + D.float() * x.float()
    out.copy_(y_RI * F.silu(z.float()))
