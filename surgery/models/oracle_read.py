"""Change the contribution of heads at the query: ablate it, patch it, or replace it by an oracle read.

In an oracle read a head attends to exactly one token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from surgery.errors import ModelError
from surgery.models.hooks import ActivationCache, hooked, replace_heads, store_output
from surgery.models.lookup import mixer_of, structure_of
from surgery.types import MixerSpec


@dataclass(frozen=True)
class OracleRead:
    """Oracle read of some heads of one mixer at the query.

    Attributes:
        heads: (W,H) bool: heads with an oracle read, in each variant.
        value: (W,B,H,P) value of the token, scaled to the norm of the head's usual output.
    """

    heads: Tensor
    value: Tensor


@contextmanager
def intervene(
    model: PreTrainedModel,
    specs: Sequence[MixerSpec],
    ablate: Mapping[str, Tensor],
    reads: Mapping[str, OracleRead],
    conv_states: Mapping[str, Tensor] | None = None,
    fills: Mapping[str, Tensor | None] | None = None,
    tokens_BT: Tensor | None = None,
) -> Iterator[None]:
    """Change heads in the forward pass inside the context, variants folded into the batch.

    Args:
        ablate: by `MixerSpec.name`, (W,H) bool: heads to ablate at the input of `out_proj`.
        reads: by `MixerSpec.name`, oracle reads at the last token. The skip stays.
        conv_states: by `MixerSpec.name`, (W*B,channels,kernel) state of the convolution before this token, or the
            (B,channels,kernel) that all variants share. Required when decoding.
        fills: by `MixerSpec.name`, values that replace the outputs of ablated heads, (B,T,I), or (B,I) for all tokens
            alike. By default zeros.
        tokens_BT: bool, tokens at which to ablate heads; None for the last one.

    Raises:
        ModelError: a hook never fired.
    """
    with hooked(model, specs) as hooks:
        for spec in specs:
            mixer, structure, layer, name = mixer_of(model, spec), structure_of(spec), spec.layer, spec.name
            in_proj = structure.in_proj(mixer)
            projected: dict[str, Tensor] = {}
            if name in reads and in_proj is not None:
                hooks.after(layer, f"{name} in_proj", in_proj, partial(store_output, projected, name))
            if name in reads:
                before = conv_states.get(name) if conv_states else None
                change = partial(_read_last, mixer, spec, reads[name], projected, before)
                hooks.before(layer, f"{name} scan", structure.scan_reader(mixer), change)
            if name in ablate:
                out_proj = structure.out_proj(mixer)
                fill = (fills or {}).get(name)
                fill = fill[:, None] if fill is not None and fill.ndim == 2 else fill
                change = partial(replace_heads, ablate[name], tokens_BT, fill)
                hooks.before(layer, f"{name} out_proj", out_proj, change)
        yield


def _read_last(
    mixer: nn.Module,
    spec: MixerSpec,
    read: OracleRead,
    projected: dict[str, Tensor],
    before: Tensor | None,
    args: tuple,
) -> tuple:
    """Replace the mixing of tokens at the last token of (W*B,T,I). The skip and the gate stay."""
    W, H = read.heads.shape
    y = args[0].clone()
    last_WBHP = y[:, -1].view(W, -1, H, y.shape[-1] // H)
    structure, value_WBHP = structure_of(spec), read.value.to(y.dtype)
    if structure.in_proj(mixer) is not None:
        streams = structure.streams(mixer, spec, projected[spec.name], before)
        by_variant = (-1, last_WBHP.shape[1])  # one row for all variants if their inputs are equal
        value_WBHP = value_WBHP + structure.skip(mixer, streams.x[:, -1]).unflatten(0, by_variant)
        if streams.gate is not None:
            value_WBHP = value_WBHP * streams.gate[:, -1].unflatten(-1, (H, -1)).unflatten(0, by_variant)
    last_WBHP.copy_(torch.where(read.heads[:, None, :, None], value_WBHP.to(y.dtype), last_WBHP))
    return (y, *args[1:])


def mixed_at_query(model: PreTrainedModel, spec: MixerSpec, activations: ActivationCache) -> Tensor:
    """Compute the scan of each head at the last token of a recorded pass, without the skip and the gate.

    Returns:
        (B,H,P)
    """
    mixer, structure = mixer_of(model, spec), structure_of(spec)
    scan_BHP = activations.scan[spec.name][:, -1].unflatten(-1, (spec.num_heads, spec.head_dim))
    if structure.in_proj(mixer) is None:
        return scan_BHP
    streams = structure.streams(mixer, spec, activations.projected[spec.name][:, -max(1, spec.conv_kernel) :])
    if streams.gate is not None:
        gate_BHP = streams.gate[:, -1].view(scan_BHP.shape)
        scan_BHP = torch.where(gate_BHP == 0, 0, scan_BHP / gate_BHP)
    return scan_BHP - structure.skip(mixer, streams.x[:, -1])


def values_at(
    model: PreTrainedModel, spec: MixerSpec, activations: ActivationCache, cache: Cache, places: Tensor
) -> Tensor:
    """Look up the value of every head at one token of each prompt.

    Args:
        activations: activations of the recorded prompts, at least at these tokens and those that the short convolution
            sees there.
        cache: cache of the recorded prompts, which has the values of attention.
        places: (B,) token indices.

    Returns:
        (B,H,P)

    Raises:
        ModelError: the cache has dropped one of the tokens, which lies before a sliding window.
    """
    mixer, structure, rows = mixer_of(model, spec), structure_of(spec), torch.arange(len(places), device=places.device)
    if structure.in_proj(mixer) is not None:
        # A stream depends on the tokens that the short convolution sees. Before the first token are zeros.
        window = places[:, None] - torch.arange(max(1, spec.conv_kernel), device=places.device).flip(0)
        projected = activations.projected_at(spec.name, window.clamp(min=0))
        return structure.streams(mixer, spec, projected * (window >= 0)[..., None]).x[:, -1]
    layer = cache.layers[spec.layer]
    dropped = layer.get_seq_length() - layer.values.shape[-2]  # tokens before a sliding window
    if int(places.min()) < dropped:
        hint = (
            f"Its cache has dropped the first {dropped} tokens, and an oracle read is among them. Set shorter prompts."
        )
        raise ModelError("layer", spec.name, hint)
    values_BGP = layer.values[rows, :, places - dropped]
    return values_BGP.repeat_interleave(spec.num_heads // spec.num_groups, dim=1)
