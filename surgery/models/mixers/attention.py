"""Softmax attention, in Transformers and in the attention layers of hybrids. Its heads are located, never spliced."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from surgery.errors import ModelError
from surgery.models.layouts import HeadSlices, Streams
from surgery.models.mixers.mamba2 import span
from surgery.types import MixerSpec


class AttentionStructure:
    """See `Structure`. A head's value is in the cache, so nothing is read from its projections."""

    kind = "attention"

    def weight_slices(self, spec: MixerSpec, head: int) -> HeadSlices:
        return HeadSlices(out=span(head, spec.head_dim))

    def in_proj(self, mixer: nn.Module) -> nn.Module | None:
        return None

    def out_proj(self, mixer: nn.Module) -> nn.Linear:
        return mixer.o_proj

    def scan_reader(self, mixer: nn.Module) -> nn.Module:
        return self.out_proj(mixer)

    def norm_weight(self, mixer: nn.Module) -> Tensor | None:
        return None

    def gate_bias(self, mixer: nn.Module) -> Tensor | None:
        return None

    def streams(self, mixer: nn.Module, spec: MixerSpec, projected: Tensor, before: Tensor | None = None) -> Streams:
        raise ModelError("layer", spec.name, "Softmax attention has no recurrence.")

    def skip(self, mixer: nn.Module, x_BHP: Tensor) -> Tensor:
        return torch.zeros_like(x_BHP)

    def hidden_attention(self, mixer: nn.Module, spec: MixerSpec, streams: Streams) -> Tensor:
        raise ModelError("layer", spec.name, "Its attention is not hidden: run the model with output_attentions.")

    def state_numel(self, spec: MixerSpec) -> int:
        return 0

    def kv_numel(self, spec: MixerSpec) -> int:
        return 2 * spec.num_groups * spec.head_dim


class NeoXAttentionStructure(AttentionStructure):
    """GPT-NeoX calls its output projection `dense`."""

    kind = "neox_attention"

    def out_proj(self, mixer: nn.Module) -> nn.Linear:
        return mixer.dense


class MambaSsmAttentionStructure(AttentionStructure):
    """The attention layers of mamba_ssm's own hybrids."""

    kind = "mamba_ssm_attention"

    def state_numel(self, spec: MixerSpec) -> int:
        return (spec.num_heads + 2 * spec.num_groups) * spec.head_dim * spec.conv_kernel

    def out_proj(self, mixer: nn.Module) -> nn.Linear:
        return mixer.out_proj


class DonorAttentionStructure(AttentionStructure):
    """A teacher's attention that took the place of an SSM mixer."""

    kind = "donor_attention"
