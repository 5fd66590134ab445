"""Softmax attention of Transformers and of hybrids' attention layers. Its heads can be located but not spliced."""

from __future__ import annotations

from torch import nn

from surgery.models.layouts import STRUCTURES, HeadSlices, Structure
from surgery.models.mixers.mamba2 import span
from surgery.types import MixerSpec


class AttentionStructure(Structure):
    """Softmax attention; see `Structure` for the methods. Values are read from the cache.

    Args:
        kind: name of the structure.
        out_proj: name of the output projection in the module.
    """

    def __init__(self, kind: str, out_proj: str) -> None:
        self.kind, self._out_proj = kind, out_proj

    def weight_slices(self, spec: MixerSpec, head: int) -> HeadSlices:
        return HeadSlices(out=span(head, spec.head_dim))

    def in_proj(self, mixer: nn.Module) -> nn.Module | None:
        return None

    def out_proj(self, mixer: nn.Module) -> nn.Linear:
        return mixer.get_submodule(self._out_proj)


for _structure in (
    AttentionStructure("attention", "o_proj"),
    AttentionStructure("neox_attention", "dense"),
    AttentionStructure("mamba_ssm_attention", "out_proj"),  # in mamba_ssm's own hybrids
    AttentionStructure("donor_attention", "o_proj"),  # of a teacher, in the place of an SSM mixer
):
    STRUCTURES.register(_structure.kind, _structure)
