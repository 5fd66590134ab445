"""Mamba-2's scan as matrix products, in the place of transformers' PyTorch code, for arms on a CPU.

transformers' code repeats B and C for every head and multiplies element by element. This computes the same formula
(Dao and Gu, arXiv 2405.21060, section 6) with products that the heads of a group share. The errors of fp32 come in
another order.

Shape legend: B batch, S chunks of L tokens, H heads, G groups, R heads of a group, P channels of a head, N state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.mamba2 import modeling_mamba2

LENGTH = 64


def chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """As transformers' `mamba2_chunk_scan`, in fp32. `chunk_size` does not change the result, and is not used.

    Args:
        hidden_states: (B,T,H,P). `dt`: (B,T,H). `A`, `D`, `dt_bias`: (H,). `B`, `C`: (B,T,G,N).
        initial_states: (B,H,P,N).

    Returns:
        (B,T,H,P), and with `return_final_states` also (B,H,P,N).
    """
    if kwargs.get("seq_idx") is not None:
        raise ValueError("seq_idx: this scan can't keep packed sequences apart. Give every text a row.")
    with torch.autocast(hidden_states.device.type, enabled=False):
        x, dt, B, C = (value.float() for value in (hidden_states, dt, B, C))
        (b, T, H, P), (G, N) = x.shape, B.shape[2:]
        R, L = H // G, min(LENGTH, T)
        dt = dt if dt_bias is None else dt + dt_bias.float()
        dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
        pad = -T % L
        S = (T + pad) // L
        scaled = F.pad(x * dt[..., None], (0, 0, 0, 0, 0, pad)).view(b, S, L, G, R * P)
        x_BSGLD = scaled.transpose(2, 3)
        B_BSGLN, C_BSGLN = (F.pad(v, (0, 0, 0, 0, 0, pad)).view(b, S, L, G, N).transpose(2, 3) for v in (B, C))
        decay_BSHL = F.pad(dt * A.float(), (0, 0, 0, pad)).view(b, S, L, H).transpose(2, 3).cumsum(-1)

        # Within a chunk: attention whose weights decay.
        causal_LL = torch.ones(L, L, dtype=torch.bool, device=x.device).tril()
        between = (decay_BSHL[..., :, None] - decay_BSHL[..., None, :]).masked_fill(~causal_LL, -torch.inf)
        weights = (C_BSGLN @ B_BSGLN.mT)[:, :, :, None] * between.exp().view(b, S, G, R, L, L)
        x_BSHLP = x_BSGLD.reshape(b, S, G, L, R, P).transpose(3, 4)
        y = (weights @ x_BSHLP).transpose(3, 4)  # (B,S,G,L,R,P)

        # Between chunks: each adds to the states, which decay. Scale x rather than B, which the heads share.
        to_end = (decay_BSHL[..., -1:] - decay_BSHL).exp().view(b, S, G, R, L).transpose(3, 4)
        added = (x_BSGLD.reshape(b, S, G, L, R, P) * to_end[..., None]).flatten(-2).mT @ B_BSGLN
        state = x.new_zeros(b, G, R * P, N) if initial_states is None else initial_states.float().view(b, G, R * P, N)
        kept = decay_BSHL[..., -1].exp().view(b, S, G, R, 1).expand(b, S, G, R, P).reshape(b, S, G, R * P, 1)
        states = []
        for s in range(S):
            states.append(state)
            state = state * kept[:, s] + added[:, s]
        read = C_BSGLN @ torch.stack(states, 1).mT
        from_start = decay_BSHL.exp().view(b, S, G, R, L).transpose(3, 4)
        y = y + read.view(b, S, G, L, R, P) * from_start[..., None]
        output = y.transpose(2, 3).reshape(b, S * L, H, P)[:, :T]
        output = output if D is None else output + D.float()[:, None] * x
    return (output, state.view(b, H, P, N)) if return_final_states else output


chunk_scan.has_kernel = False  # type: ignore[attr-defined]  # as for the code that it replaces: rows are not packed


@contextmanager
def fast_scan() -> Iterator[None]:
    """Run plain Mamba-2 mixers, also those of hybrids, with `chunk_scan` inside the context."""
    given = modeling_mamba2.mamba2_chunk_scan
    modeling_mamba2.mamba2_chunk_scan = chunk_scan
    try:
        yield
    finally:
        modeling_mamba2.mamba2_chunk_scan = given
