"""Mamba-1's mixer, in `mamba` and `falcon_mamba`. It has no heads, so groups of channels take their place.

Layout of `in_proj`'s rows: [x | z]; `x_proj` makes [dt | B | C] from all channels after the convolution (Gu and Dao,
arXiv 2312.00752; transformers' `MambaMixer`). Falcon-Mamba normalises the three (arXiv 2410.05355).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.models.layouts import HeadSlices, Streams, Structure, register_structure
from surgery.models.mixers.mamba2 import shift, short_conv, span
from surgery.types import MixerSpec


@register_structure
class Mamba1Structure(Structure):
    """Mamba-1; see `Structure` for the methods."""

    kind = "mamba1"

    def weight_slices(self, spec: MixerSpec, head: int) -> HeadSlices:
        channels = span(head, spec.head_dim)
        gate = shift(channels, spec.num_heads * spec.head_dim)
        return HeadSlices(out=channels, gate=gate, value=channels, conv_value=channels)

    def streams(self, mixer: nn.Module, spec: MixerSpec, projected: Tensor, before: Tensor | None = None) -> Streams:
        x_BTI, z_BTI = projected.chunk(2, dim=-1)
        x_BTI = mixer.act(short_conv(mixer.conv1d, x_BTI, before))
        widths = [mixer.time_step_rank, spec.state_size, spec.state_size]
        step, key, query = F.linear(x_BTI, mixer.x_proj.weight).split(widths, dim=-1)
        if self.kind == "falcon_mamba":
            step, key, query = mixer.dt_layernorm(step), mixer.b_layernorm(key), mixer.c_layernorm(query)
        step_BTI = F.softplus(mixer.dt_proj(step))
        x = x_BTI.unflatten(-1, (spec.num_heads, spec.head_dim))
        return Streams(x, key[:, :, None], query[:, :, None], step_BTI, F.silu(z_BTI))

    def skip(self, mixer: nn.Module, x_BHP: Tensor) -> Tensor:
        return mixer.D.view(x_BHP.shape[-2:]) * x_BHP

    def hidden_attention(self, mixer: nn.Module, spec: MixerSpec, streams: Streams) -> Tensor:
        """`a[t,s] = sum_n C_tn exp(A_n sum_{k=s+1..t} dt_k) dt_s B_sn`, for each channel; (B,I,T,T)."""
        T = streams.step.shape[1]
        total_BIT = streams.step.cumsum(1).transpose(1, 2)
        between = total_BIT[..., :, None] - total_BIT[..., None, :]
        causal = torch.ones(T, T, dtype=torch.bool, device=between.device).tril()
        A_IN = -mixer.A_log.exp()
        weights = torch.zeros_like(between)
        for n in range(spec.state_size):  # one (B,I,T,T) at a time
            log_decay = (A_IN[:, n, None, None] * between).masked_fill(~causal, -torch.inf)
            pair_BTS = streams.query[:, :, 0, n, None] * streams.key[:, None, :, 0, n]
            weights = weights + log_decay.exp() * pair_BTS[:, None]
        return weights * streams.step.transpose(1, 2)[:, :, None, :]


@register_structure
class FalconMambaStructure(Mamba1Structure):
    """Mamba-1 with norms on dt, B and C."""

    kind = "falcon_mamba"
