"""Softmax attention of Transformers and of hybrids' attention layers. Its heads can be located but not spliced."""

from __future__ import annotations

from torch import nn

from surgery.models.layouts import HeadSlices, Structure, register_structure
from surgery.models.mixers.mamba2 import span
from surgery.types import MixerSpec


@register_structure
class AttentionStructure(Structure):
    """Softmax attention; see `Structure` for the methods. Values are read from the cache."""

    kind = "attention"

    def weight_slices(self, spec: MixerSpec, head: int) -> HeadSlices:
        return HeadSlices(out=span(head, spec.head_dim))

    def in_proj(self, mixer: nn.Module) -> nn.Module | None:
        return None

    def out_proj(self, mixer: nn.Module) -> nn.Linear:
        return mixer.o_proj


@register_structure
class NeoXAttentionStructure(AttentionStructure):
    """GPT-NeoX calls its output projection `dense`."""

    kind = "neox_attention"

    def out_proj(self, mixer: nn.Module) -> nn.Linear:
        return mixer.dense


@register_structure
class MambaSsmAttentionStructure(AttentionStructure):
    """The attention layers of mamba_ssm's own hybrids."""

    kind = "mamba_ssm_attention"

    def out_proj(self, mixer: nn.Module) -> nn.Linear:
        return mixer.out_proj


@register_structure
class DonorAttentionStructure(AttentionStructure):
    """A teacher's attention that replaced an SSM mixer."""

    kind = "donor_attention"
