"""Ablate heads at chosen tokens: replace their outputs by zeros, by their mean, or by those on another prompt.

A head contributes through its block of columns of `out_proj`. Ablation replaces the input of this block.

Shape legend: B prompts, T tokens, I inner width of a mixer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.data.encoding import EncodedBatch
from surgery.types import Fill, Where


@dataclass(frozen=True)
class Ablation:
    """Tokens at which a head is ablated (`token_mask`), and the replacement of its output (`fill_values`)."""

    where: Where = "everywhere"
    fill: Fill = "zero"


def token_mask(batch: EncodedBatch, where: Where) -> Tensor:
    """Select tokens by their role in the last question of each prompt.

    Args:
        batch: left-padded prompts that end at the query.
        where: `everywhere`, `query` (the last token), `context` (all others), `segment` (the whole gold segment), or a
            position of the batch such as `segment_end`. A prompt without this position (-1) selects nothing.

    Returns:
        (B,T) bool
    """
    B, T = batch.input_ids.shape
    place_T = torch.arange(T, device=batch.input_ids.device)
    if where == "everywhere":
        return torch.ones(B, T, dtype=torch.bool, device=place_T.device)
    if where in ("query", "context"):
        return ((place_T == T - 1) == (where == "query")).expand(B, T)
    last = (batch.gold >= 0).sum(1).clamp(min=1) - 1
    rows = torch.arange(B, device=place_T.device)
    if where == "segment":
        start, end = (x[rows, last][:, None] for x in (batch.segment_start, batch.segment_end))
        return (start >= 0) & (place_T >= start) & (place_T <= end)
    return place_T == getattr(batch, where)[rows, last][:, None]


def fill_values(u_BTI: Tensor, batch: EncodedBatch, fill: Fill, owner_B: Tensor | None = None) -> Tensor | None:
    """Compute the replacement for the outputs of ablated heads.

    Prompts end at the query, so the same column has the same distance from it in all prompts.

    Args:
        u_BTI: clean outputs of the heads.
        fill: `mean` is over the prompts of the batch that have a token at this place. `resample` takes the next prompt
            that has one, or the prompt itself if no other has.
        owner_B: the prompt of each row, if the rows are paths of several tokens (`CleanPass.owner`).

    Returns:
        (B,T,I); None for zeros.
    """
    if fill == "zero":
        return None
    real_BT = batch.attention_mask.bool()
    if fill == "mean":
        total_TI, count_T = (u_BTI * real_BT[..., None]).sum(0), real_BT.sum(0).clamp(min=1)
        return (total_TI / count_T[:, None]).to(u_BTI.dtype).expand_as(u_BTI)
    row_B = torch.arange(len(batch), device=u_BTI.device)
    owner_B = row_B if owner_B is None else owner_B
    other_BT, is_filled_BT = row_B[:, None].expand_as(real_BT), torch.zeros_like(real_BT)
    for shift in range(1, len(batch)):
        takes_BT = real_BT.roll(-shift, 0) & ~is_filled_BT & (owner_B.roll(-shift) != owner_B)[:, None]
        other_BT, is_filled_BT = torch.where(takes_BT, row_B.roll(-shift)[:, None], other_BT), is_filled_BT | takes_BT
    return u_BTI.gather(0, other_BT[..., None].expand_as(u_BTI))
