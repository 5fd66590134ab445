"""Mamba-2's mixer, in transformers' `mamba2` and in the SSM layers of hybrids.

Layout of `in_proj`'s rows and of the convolution's channels: [z | x | B | C | dt] and [x | B | C]
(Dao and Gu, arXiv 2405.21060; transformers' `Mamba2Mixer`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.models.layouts import HeadSlices, Streams, register_structure
from surgery.types import MixerSpec


@register_structure
class Mamba2Structure:
    """Mamba-2; see `Structure` for the methods."""

    kind = "mamba2"
    chunked = True

    def weight_slices(self, spec: MixerSpec, head: int) -> HeadSlices:
        inner, groups = spec.num_heads * spec.head_dim, spec.num_groups * spec.state_size
        channels = span(head, spec.head_dim)
        shared = span(spec.group_of(head), spec.state_size)
        return HeadSlices(
            out=channels,
            gate=channels,
            value=shift(channels, inner),
            key=shift(shared, 2 * inner),
            query=shift(shared, 2 * inner + groups),
            conv_value=channels,
            conv_key=shift(shared, inner),
            conv_query=shift(shared, inner + groups),
        )

    def in_proj(self, mixer: nn.Module) -> nn.Module:
        return mixer.in_proj

    def out_proj(self, mixer: nn.Module) -> nn.Linear:
        return mixer.out_proj

    def scan_reader(self, mixer: nn.Module) -> nn.Module:
        """Return the gated norm, the last place where heads are separate."""
        return mixer.norm

    def norm_weight(self, mixer: nn.Module) -> Tensor | None:
        return mixer.norm.weight

    def gate_bias(self, mixer: nn.Module) -> Tensor | None:
        return None

    def streams(self, mixer: nn.Module, spec: MixerSpec, projected: Tensor, before: Tensor | None = None) -> Streams:
        inner, groups = spec.num_heads * spec.head_dim, spec.num_groups * spec.state_size
        _, mixed_BTC, step_BTH = projected.split([inner, inner + 2 * groups, spec.num_heads], dim=-1)
        mixed_BTC = mixer.act(short_conv(mixer.conv1d, mixed_BTC, before))
        x, key, query = mixed_BTC.split([inner, groups, groups], -1)
        step_BTH = F.softplus(step_BTH + mixer.dt_bias).clamp(*mixer.time_step_limit)
        grouped = (spec.num_groups, spec.state_size)
        return Streams(
            x.unflatten(-1, (spec.num_heads, spec.head_dim)),
            key.unflatten(-1, grouped),
            query.unflatten(-1, grouped),
            step_BTH,
        )

    def skip(self, mixer: nn.Module, x_BHP: Tensor) -> Tensor:
        return mixer.D[:, None] * x_BHP

    def hidden_attention(self, mixer: nn.Module, spec: MixerSpec, streams: Streams) -> Tensor:
        """`a[t,s] = (C_t . B_s) exp(A sum_{k=s+1..t} dt_k) dt_s`, masked before the exponential."""
        weights_BHTS = decayed_scores(streams, -mixer.A_log.exp() * streams.step, spec)
        return weights_BHTS * streams.step.transpose(1, 2)[:, :, None, :]

    def state_numel(self, spec: MixerSpec) -> int:
        inner = spec.num_heads * spec.head_dim
        return (inner + 2 * spec.num_groups * spec.state_size) * spec.conv_kernel + inner * spec.state_size

    def kv_numel(self, spec: MixerSpec) -> int:
        return 0


@register_structure
class FalconH1Structure(Mamba2Structure):
    """Mamba-2 whose projections are multiplied by constants, and whose gated norm is optional."""

    kind = "falcon_h1"

    def scan_reader(self, mixer: nn.Module) -> nn.Module:
        return mixer.norm if mixer.mamba_rms_norm else mixer.out_proj

    def norm_weight(self, mixer: nn.Module) -> Tensor | None:
        return mixer.norm.weight if mixer.mamba_rms_norm else None

    def streams(self, mixer: nn.Module, spec: MixerSpec, projected: Tensor, before: Tensor | None = None) -> Streams:
        projected = projected * mixer.mup_vector
        streams = super().streams(mixer, spec, projected, before)
        if mixer.mamba_rms_norm:
            return streams
        return replace(streams, gate=F.silu(projected[..., : spec.num_heads * spec.head_dim]))


def short_conv(conv1d: nn.Module, mixed_BTC: Tensor, conv_state: Tensor | None) -> Tensor:
    """Run the causal depthwise convolution.

    Args:
        mixed_BTC: (B,T,channels) input.
        conv_state: (B,channels,kernel) inputs before the first token; zeros if None.

    Returns:
        (B,T,channels)
    """
    T, width = mixed_BTC.shape[1], conv1d.weight.shape[-1] - 1
    mixed_BCT = mixed_BTC.transpose(1, 2)
    before = torch.zeros_like(mixed_BCT[..., :1]).expand(-1, -1, width) if conv_state is None else conv_state
    mixed_BCT = torch.cat([before[..., before.shape[-1] - width :], mixed_BCT], dim=-1)
    mixed_BCT = F.conv1d(mixed_BCT, conv1d.weight, conv1d.bias, groups=mixed_BCT.shape[1])
    return mixed_BCT[..., -T:].transpose(1, 2)


def decayed_scores(streams: Streams, log_decay_BTH: Tensor, spec: MixerSpec) -> Tensor:
    """Compute `(C_t . B_s) exp(sum of the log decay after s, up to t)`, with zeros above the diagonal.

    Args:
        log_decay_BTH: (B,T,H) logarithm of the decay.

    Returns:
        (B,H,T,T)
    """
    T = streams.x.shape[1]
    per_group = spec.num_heads // spec.num_groups
    scores_BHTS = torch.einsum("btgn,bsgn->bgts", streams.query, streams.key).repeat_interleave(per_group, 1)
    total_BHT = log_decay_BTH.cumsum(1).transpose(1, 2)
    between = total_BHT[..., :, None] - total_BHT[..., None, :]
    causal = torch.ones(T, T, dtype=torch.bool, device=between.device).tril()
    return scores_BHTS * between.masked_fill(~causal, -torch.inf).exp()


def span(index: int, width: int) -> slice:
    """Return the slice of the `index`-th block of `width`."""
    return slice(index * width, (index + 1) * width)


def shift(block: slice, by: int) -> slice:
    """Return the slice shifted by `by`."""
    return slice(block.start + by, block.stop + by)
