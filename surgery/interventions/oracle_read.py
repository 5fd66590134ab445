"""Replace what a head reads at the query: nothing, or exactly one position (an oracle read)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from surgery.interventions.hooks import Trace, _keep_output, hooked
from surgery.models.lookup import mixer_of, structure_of
from surgery.types import MixerSpec


@dataclass(frozen=True)
class PerfectRead:
    """What a head would put out at the query if it read one token alone.

    Attributes:
        heads: (W,H) bool: which heads of the mixer read perfectly, in each variant.
        value: (W,B,H,P) the token's value, scaled to the head's usual output.
    """

    heads: Tensor
    value: Tensor


@contextmanager
def intervene(
    model: PreTrainedModel,
    specs: Sequence[MixerSpec],
    ablate: Mapping[str, Tensor],
    sharpen: Mapping[str, PerfectRead],
    conv_states: Mapping[str, Tensor] | None = None,
) -> Iterator[None]:
    """Changes heads at the last token of the forward pass that runs inside, variants folded into the batch.

    Args:
        ablate: by `MixerSpec.name`, (W,H) bool: heads whose contribution is removed at the input of `out_proj`.
        sharpen: by name, the heads whose mixing row becomes one-hot; the skip stays.
        conv_states: by name, (W*B,channels,kernel), the convolution's state before this token, where decoding.
    """
    with hooked(model, specs) as hooks:
        for spec in specs:
            mixer, structure, layer, name = mixer_of(model, spec), structure_of(spec), spec.layer, spec.name
            in_proj = structure.in_proj(mixer)
            seen: dict[str, Tensor] = {}
            if name in sharpen and in_proj is not None:
                hooks.after(layer, f"{name} in_proj", in_proj, partial(_keep_output, seen, name))
            if name in sharpen:
                before = conv_states.get(name) if conv_states else None
                change = partial(_sharpen_last, mixer, spec, sharpen[name], seen, before)
                hooks.before(layer, f"{name} scan", structure.scan_reader(mixer), change)
            if name in ablate:
                out_proj = structure.out_proj(mixer)
                hooks.before(layer, f"{name} out_proj", out_proj, partial(_ablate_last, ablate[name]))
        yield


def _ablate_last(mask_WH: Tensor, args: tuple) -> tuple:
    """Zeroes heads of the last token of (W*B,T,I)."""
    W, H = mask_WH.shape
    u = args[0].clone()
    last = u[:, -1].view(W, -1, H, u.shape[-1] // H)
    last *= (~mask_WH)[:, None, :, None]
    return (u, *args[1:])


def _sharpen_last(
    mixer: nn.Module, spec: MixerSpec, read: PerfectRead, seen: dict[str, Tensor], before: Tensor | None, args: tuple
) -> tuple:
    """Replaces what is mixed in at the last token of (W*B,T,I); the skip stays, and so does the gate."""
    W, H = read.heads.shape
    y = args[0].clone()
    last_WBHP = y[:, -1].view(W, -1, H, y.shape[-1] // H)
    structure, value_WBHP = structure_of(spec), read.value.to(y.dtype)
    if structure.in_proj(mixer) is not None:
        streams = structure.streams(mixer, spec, seen[spec.name], before)
        value_WBHP = value_WBHP + structure.skip(mixer, streams.x[:, -1]).view(last_WBHP.shape)
        if streams.gate is not None:
            value_WBHP = value_WBHP * streams.gate[:, -1].view(last_WBHP.shape)
    last_WBHP.copy_(torch.where(read.heads[:, None, :, None], value_WBHP.to(y.dtype), last_WBHP))
    return (y, *args[1:])


def mixed_at_query(model: PreTrainedModel, spec: MixerSpec, trace: Trace) -> Tensor:
    """(B,H,P) what each head mixes in at the last token of a recorded pass: its scan without the skip and the gate."""
    mixer, structure = mixer_of(model, spec), structure_of(spec)
    scan_BHP = trace.scan[spec.name][:, -1].unflatten(-1, (spec.num_heads, spec.head_dim))
    if structure.in_proj(mixer) is None:
        return scan_BHP
    streams = structure.streams(mixer, spec, trace.projected[spec.name])
    if streams.gate is not None:
        gate_BHP = streams.gate[:, -1].view(scan_BHP.shape)
        scan_BHP = torch.where(gate_BHP == 0, 0, scan_BHP / gate_BHP)
    return scan_BHP - structure.skip(mixer, streams.x[:, -1])


def values_at(model: PreTrainedModel, spec: MixerSpec, trace: Trace, cache: Cache, places: Tensor) -> Tensor:
    """(B,H,P) the value of every head at one token of each prompt.

    Args:
        cache: of the recorded prompts; attention keeps its values there.
        places: (B,) token indices.
    """
    mixer, structure, rows = mixer_of(model, spec), structure_of(spec), torch.arange(len(places), device=places.device)
    if structure.in_proj(mixer) is not None:
        return structure.streams(mixer, spec, trace.projected[spec.name]).x[rows, places]
    values_BGP = cache.layers[spec.layer].values[rows, :, places]
    return values_BGP.repeat_interleave(spec.num_heads // spec.num_groups, dim=1)
