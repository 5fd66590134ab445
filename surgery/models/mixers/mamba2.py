"""Mamba-2's mixer, in transformers' `mamba2` and in the SSM layers of hybrids.

Layout of `in_proj`'s rows and of the convolution's channels: [z | x | B | C | dt] and [x | B | C]
(Dao and Gu, arXiv 2405.21060; transformers' `Mamba2Mixer`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.models.layouts import HeadSlices, Streams, Structure, register_structure
from surgery.types import MixerSpec


@register_structure
class Mamba2Structure(Structure):
    """Mamba-2; see `Structure` for the methods."""

    kind = "mamba2"

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

    def scan_reader(self, mixer: nn.Module) -> nn.Module:
        """Return the gated norm, the last place where heads are separate."""
        return mixer.norm

    def norm_weight(self, mixer: nn.Module) -> Tensor | None:
        return mixer.norm.weight

    def streams(self, mixer: nn.Module, spec: MixerSpec, projected: Tensor, before: Tensor | None = None) -> Streams:
        streams = self._unlimited(mixer, spec, projected, before)
        return replace(streams, step=streams.step.clamp(*mixer.time_step_limit))

    def _unlimited(self, mixer: nn.Module, spec: MixerSpec, projected: Tensor, before: Tensor | None) -> Streams:
        """Streams whose step is not clamped."""
        inner, groups = spec.num_heads * spec.head_dim, spec.num_groups * spec.state_size
        _, mixed_BTC, step_BTH = projected.split([inner, inner + 2 * groups, spec.num_heads], dim=-1)
        return Streams(*convolved(mixer, spec, mixed_BTC, before), F.softplus(step_BTH + mixer.dt_bias))

    def step_from_state(
        self, mixer: nn.Module, spec: MixerSpec, u_R1D: Tensor, before: Tensor, state_BHPN: Tensor, copies: int = 1
    ) -> Tensor:
        projected = self._projected(mixer, u_R1D)
        streams = self._unlimited(mixer, spec, projected, before)  # transformers' decode step does not clamp
        x, step = streams.x[:, 0], streams.step[:, 0]
        decay_RH = (-mixer.A_log.float().exp() * step.float()).exp()
        y_RHP = read_state(x * step[..., None], streams.key[:, 0], streams.query[:, 0], decay_RH, state_BHPN)
        y_R1I = (y_RHP + self.skip(mixer, x)).to(x.dtype).flatten(1)[:, None]
        gate_R1I = projected[..., : y_R1I.shape[-1]]
        y_R1I, gate_R1I = (v.repeat(copies, 1, 1) for v in (y_R1I, gate_R1I))
        return mixer.out_proj(self._gated(mixer, y_R1I, gate_R1I).to(u_R1D.dtype))

    def _projected(self, mixer: nn.Module, u: Tensor) -> Tensor:
        return mixer.in_proj(u)

    def _gated(self, mixer: nn.Module, y: Tensor, gate: Tensor) -> Tensor:
        return mixer.norm(y, gate)

    def skip(self, mixer: nn.Module, x_BHP: Tensor) -> Tensor:
        return mixer.D[:, None] * x_BHP

    def hidden_attention(self, mixer: nn.Module, spec: MixerSpec, streams: Streams) -> Tensor:
        """`a[t,s] = (C_t . B_s) exp(A sum_{k=s+1..t} dt_k) dt_s`, masked before the exponential."""
        weights_BHTS = decayed_scores(streams, -mixer.A_log.exp() * streams.step, spec)
        return weights_BHTS * streams.step.transpose(1, 2)[:, :, None, :]


@register_structure
class FalconH1Structure(Mamba2Structure):
    """Mamba-2 whose projections are multiplied by constants, and whose gated norm is optional."""

    kind = "falcon_h1"

    def scan_reader(self, mixer: nn.Module) -> nn.Module:
        return mixer.norm if mixer.mamba_rms_norm else mixer.out_proj

    def norm_weight(self, mixer: nn.Module) -> Tensor | None:
        return mixer.norm.weight if mixer.mamba_rms_norm else None

    def _unlimited(self, mixer: nn.Module, spec: MixerSpec, projected: Tensor, before: Tensor | None) -> Streams:
        projected = projected * mixer.mup_vector
        streams = super()._unlimited(mixer, spec, projected, before)
        if mixer.mamba_rms_norm:
            return streams
        return replace(streams, gate=F.silu(projected[..., : spec.num_heads * spec.head_dim]))

    def _projected(self, mixer: nn.Module, u: Tensor) -> Tensor:
        return mixer.in_proj(u * mixer.ssm_in_multiplier)

    def _gated(self, mixer: nn.Module, y: Tensor, gate: Tensor) -> Tensor:
        gate = gate * mixer.mup_vector[..., : gate.shape[-1]]
        return mixer.norm(y, gate) if mixer.mamba_rms_norm else y * F.silu(gate)


def convolved(
    mixer: nn.Module, spec: MixerSpec, mixed_BTC: Tensor, before: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x (B,T,H,P), B and C (B,T,G,N) after the convolution of [x | B | C] and its activation."""
    inner, grouped = spec.num_heads * spec.head_dim, (2, spec.num_groups, spec.state_size)
    x_BTI, key_and_query = mixer.act(short_conv(mixer.conv1d, mixed_BTC, before)).tensor_split([inner], -1)
    key, query = key_and_query.unflatten(-1, grouped).unbind(-3)
    return x_BTI.unflatten(-1, (spec.num_heads, spec.head_dim)), key, query


def short_conv(conv1d: nn.Module, mixed_BTC: Tensor, conv_state: Tensor | None) -> Tensor:
    """Run the causal depthwise convolution.

    Args:
        mixed_BTC: (B,T,channels) input.
        conv_state: (B,channels,kernel) inputs before the first token; zeros if None. For a single token it may have
            fewer rows, which B repeats.

    Returns:
        (B,T,channels)
    """
    T, width = mixed_BTC.shape[1], conv1d.weight.shape[-1] - 1
    if T == 1 and conv_state is not None:  # no copy of the window, and one sum of it for all repeated rows
        weight_CK = conv1d.weight[:, 0]
        past_BC = (conv_state[..., conv_state.shape[-1] - width :] * weight_CK[:, :width]).sum(-1)
        if conv1d.bias is not None:
            past_BC = past_BC + conv1d.bias
        return (
            (mixed_BTC[:, 0] * weight_CK[:, width]).unflatten(0, (-1, len(past_BC))).add(past_BC).flatten(0, 1)[:, None]
        )
    mixed_BCT = mixed_BTC.transpose(1, 2)
    before = torch.zeros_like(mixed_BCT[..., :1]).expand(-1, -1, width) if conv_state is None else conv_state
    mixed_BCT = torch.cat([before[..., before.shape[-1] - width :], mixed_BCT], dim=-1)
    mixed_BCT = F.conv1d(mixed_BCT, conv1d.weight, conv1d.bias, groups=mixed_BCT.shape[1])
    return mixed_BCT[..., -T:].transpose(1, 2)


def read_state(value_RHP: Tensor, key_RGN: Tensor, query_RGN: Tensor, decay_RH: Tensor, state_BHPN: Tensor) -> Tensor:
    """Compute the output of the recurrence at one token, without the state after it.

    With state h, decay a, value v, key B and query C, `C (a h + v B^T)` is `a (C h) + v (B C)`. The product `C h` of
    all rows that continue one state is a single matrix product.

    Args:
        value_RHP: input of the recurrence, for R rows. Row w*B + b continues state b.
        decay_RH: factor on the state.

    Returns:
        (R,H,P) without the skip, in the wider of the dtypes of query and decay.
    """
    B, G = len(state_BHPN), key_RGN.shape[1]
    state_BGMN = state_BHPN.unflatten(1, (G, -1)).flatten(2, 3).to(query_RGN.dtype)
    query_BGWN = query_RGN.unflatten(0, (-1, B)).permute(1, 2, 0, 3)
    read_BGWM = query_BGWN @ state_BGMN.transpose(-1, -2)
    read_RHP = read_BGWM.permute(2, 0, 1, 3).reshape(value_RHP.shape)
    own_RH = (key_RGN * query_RGN).sum(-1).repeat_interleave(value_RHP.shape[1] // G, 1)
    return read_RHP * decay_RH[..., None] + value_RHP * own_RH[..., None]


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
