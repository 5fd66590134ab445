"""Parameters of inserted layers that training must not change, or changes in part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from surgery.models.inserted import own_channels, pairs_of


def held_parameters(model: nn.Module, in_reads: bool = False) -> list[nn.Parameter]:
    """Return parameters that training must not change.

    They are the scales that keep copies in side channels small, and with `output: copy` all that values and gate are
    made of: the Gather layer, of which `trained_parts` train where a stage trains `reads`, and the block's values.
    """
    held = []
    for gather, block, entry in _copying(model):
        held.append(gather.mixer.norm.weight)
        if "output" in entry:
            trained = trained_parts(gather, entry) if in_reads else {}
            held += [parameter for parameter in gather.parameters() if parameter not in trained]
            held.append(block.mixer.v_proj.weight)
    return held


def read_masks(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Return what trains of parameters that `trainable: reads` trains in part: 1, and 0 where a gradient must be 0."""
    masks: dict[nn.Parameter, Tensor] = {}
    for gather, _, entry in _copying(model):
        if "output" in entry:
            masks |= trained_parts(gather, entry)
    return masks


def trained_parts(gather: nn.Module, entry: Mapping[str, Any]) -> dict[nn.Parameter, Tensor]:
    """Return masks of what keys and queries of a pair with `output: copy` are made of in its Gather layer.

    They are all channels before those of the values, and the first half of the side channels.
    """
    mixer, own = gather.mixer, own_channels(entry)
    assert own is not None
    inner, first = mixer.intermediate_size, value_channels(mixer, len(entry["heads"])).start
    rows: dict[nn.Parameter, tuple[Any, ...]] = {
        mixer.in_proj.weight: ([*range(first), *range(inner, inner + first)],),
        mixer.conv1d.weight: (slice(first),),
        mixer.out_proj.weight: (halves(own)[0], slice(first)),
    }
    if mixer.in_proj.bias is not None:
        rows[mixer.in_proj.bias] = rows[mixer.in_proj.weight]
    if mixer.conv1d.bias is not None:
        rows[mixer.conv1d.bias] = (slice(first),)
    masks = {parameter: torch.zeros_like(parameter) for parameter in rows}
    for parameter, where in rows.items():
        masks[parameter][where] = 1
    return masks


def value_channels(mixer: nn.Module, heads: int) -> slice:
    """Return the channels of a Gather layer that hold x of some heads: before its last head, which has the marks."""
    end = mixer.intermediate_size - mixer.head_dim
    return slice(end - heads * mixer.head_dim, end)


def halves(own: slice) -> tuple[slice, slice]:
    """Return the side channels of a pair with `output: copy`: of keys and queries, and of values and the mark."""
    middle = (own.start + own.stop) // 2
    return slice(own.start, middle), slice(middle, own.stop)


def _copying(model: nn.Module) -> list[tuple[nn.Module, nn.Module, dict[str, Any]]]:
    return [pair for pair in pairs_of(model) if pair[2]["init"] == "ssm"]
