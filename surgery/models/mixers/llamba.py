"""Llamba's mixer, a discrete Mamba-2 whose decay per head is a projection of the input.

Layout of `in_proj`'s rows and of the convolution's channels: [x | B | C | z | a] and [x | B | C] (arXiv 2408.10189; our
`LlambaMixer`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.models.layouts import HeadSlices, Streams, register_structure
from surgery.models.mixers.mamba2 import Mamba2Structure, convolved, decayed_scores, read_state, shift
from surgery.types import MixerSpec


@register_structure
class LlambaStructure(Mamba2Structure):
    """Llamba; see `Structure` for the methods."""

    kind = "llamba"

    def weight_slices(self, spec: MixerSpec, head: int) -> HeadSlices:
        slices = super().weight_slices(spec, head)  # the convolution has the order of the first rows of `in_proj`
        gate = shift(slices.out, spec.num_heads * spec.head_dim + 2 * spec.num_groups * spec.state_size)
        return replace(slices, gate=gate, value=slices.out, key=slices.conv_key, query=slices.conv_query)

    def scan_reader(self, mixer: nn.Module) -> nn.Module:
        return mixer.out_proj

    def norm_weight(self, mixer: nn.Module) -> Tensor | None:
        return None

    def gate_bias(self, mixer: nn.Module) -> Tensor | None:
        return mixer.z_bias

    def streams(self, mixer: nn.Module, spec: MixerSpec, projected: Tensor, before: Tensor | None = None) -> Streams:
        inner, groups = spec.num_heads * spec.head_dim, spec.num_groups * spec.state_size
        mixed_BTC, gate_BTI, step_BTH = projected.split([inner + 2 * groups, inner, spec.num_heads], dim=-1)
        if mixer.z_bias is not None:
            gate_BTI = gate_BTI + mixer.z_bias
        # fp32 at least, as in the model: sums of it are exponentiated.
        log_decay_BTH = -F.softplus(step_BTH.to(torch.promote_types(step_BTH.dtype, torch.float32)))
        return Streams(*convolved(mixer, spec, mixed_BTC, before), log_decay_BTH, F.silu(gate_BTI))

    def step_from_state(
        self, mixer: nn.Module, spec: MixerSpec, u_R1D: Tensor, before: Tensor, state_BHPN: Tensor, copies: int = 1
    ) -> Tensor:
        streams = self.streams(mixer, spec, mixer.in_proj(u_R1D), before)
        decay_RH = streams.step[:, 0].exp()
        x, key, query = (v[:, 0].to(decay_RH.dtype) for v in (streams.x, streams.key, streams.query))
        y_RHP = read_state(x, key, query, decay_RH, state_BHPN) + self.skip(mixer, x)
        y_R1I = y_RHP.flatten(1)[:, None] * streams.gate
        return mixer.out_proj(y_R1I.to(u_R1D.dtype).repeat(copies, 1, 1))

    def hidden_attention(self, mixer: nn.Module, spec: MixerSpec, streams: Streams) -> Tensor:
        """`a[t,s] = (C_t . B_s) exp(-sum_{k=s+1..t} softplus(a_k))`, masked before the exponential."""
        return decayed_scores(streams, streams.step, spec)
