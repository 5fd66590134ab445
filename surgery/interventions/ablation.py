"""What takes the place of heads that are removed, and at which tokens. Owns: positions, baselines, that one hook.

A head's contribution is its block of columns of `out_proj`; removing it means that the block's input is something else:
zeros, its mean over the prompts at the same distance from the query, or what it was in another prompt (resampling).
Must never know: scores, how passes are shared.

Shape legend: B prompts, T tokens, I inner width (H heads of P), W variants folded into the batch, variant-major.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgery.data.encoding import EncodedBatch
from surgery.interventions.hooks import hooked
from surgery.models.lookup import mixer_of, structure_of
from surgery.types import Fill, MixerSpec, Where


@dataclass(frozen=True)
class Removal:
    """At which tokens a head is removed, and what takes its place."""

    where: Where = "everywhere"
    fill: Fill = "zero"


def tokens_of(batch: EncodedBatch, where: Where) -> Tensor:
    """(B,T) bool: the tokens of left-padded prompts that end at the query; positions are of the last question.

    `segment` is the gold segment from its first token to its end. A position that a prompt does not have (-1) is none.
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


def baseline(u_BTI: Tensor, batch: EncodedBatch, fill: Fill) -> Tensor | None:
    """(B,T,I) what takes the place of heads whose clean outputs are `u_BTI`; None for zeros.

    Prompts end at the query, so the same column is the same distance from it. `mean` is over the batch's prompts that
    have a token there; `resample` takes the next prompt that has one, or its own where no other does.
    """
    if fill == "zero":
        return None
    real_BT1 = batch.attention_mask.bool()[..., None]
    if fill == "mean":
        total_TI, count_T1 = (u_BTI * real_BT1).sum(0), real_BT1.sum(0).clamp(min=1)
        return (total_TI / count_T1).to(u_BTI.dtype).expand_as(u_BTI)
    other, found = u_BTI, torch.zeros_like(real_BT1)
    for shift in range(1, len(batch)):
        there = real_BT1.roll(-shift, 0) & ~found
        other, found = torch.where(there, u_BTI.roll(-shift, 0), other), found | there
    return other


@contextmanager
def replaced(
    model: PreTrainedModel,
    specs: Sequence[MixerSpec],
    heads: Mapping[str, Tensor],
    tokens_BT: Tensor,
    fills: Mapping[str, Tensor | None],
) -> Iterator[None]:
    """Removes heads in the forward pass that runs inside.

    Args:
        heads: by `MixerSpec.name`, (W,H) bool: which are removed, in each variant.
        tokens_BT: where.
        fills: by name, (B,T,I) from `baseline`.

    Raises:
        ModelError: a mixer's `out_proj` was not called as a module.
    """
    with hooked(model, specs) as hooks:
        for spec in specs:
            if spec.name in heads:
                out_proj = structure_of(spec).out_proj(mixer_of(model, spec))
                change = partial(_replace, heads[spec.name], tokens_BT, fills.get(spec.name))
                hooks.before(spec.layer, f"{spec.name} out_proj", out_proj, change)
        yield


def _replace(heads_WH: Tensor, tokens_BT: Tensor, fill_BTI: Tensor | None, args: tuple) -> tuple:
    """Of (W*B,T,I)."""
    W, H = heads_WH.shape
    u_WBTHP = args[0].unflatten(0, (W, -1)).unflatten(-1, (H, -1))
    gone_WBTH = heads_WH[:, None, None] & tokens_BT[None, :, :, None]
    instead = 0 if fill_BTI is None else fill_BTI.unflatten(-1, (H, -1)).to(u_WBTHP.dtype)
    return (torch.where(gone_WBTH[..., None], instead, u_WBTHP).flatten(3).flatten(0, 1), *args[1:])
