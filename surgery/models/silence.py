"""Silence heads permanently: set their columns of the output projection to zero."""

from __future__ import annotations

import torch
from torch import nn

from surgery.models.lookup import structure_of
from surgery.types import Graft


@torch.no_grad()
def silence(out_proj: nn.Linear, graft: Graft) -> None:
    """Zero the heads' columns of `out_proj`. Training keeps them at zero. Call it again after merging adapters."""
    for head in graft.heads:
        out_proj.weight[:, structure_of(graft.site).weight_slices(graft.site, head).out] = 0
