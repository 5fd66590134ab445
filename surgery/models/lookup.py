"""One file for each mixer structure, the table of model types, and the way from a config to its family."""

from __future__ import annotations

import difflib

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from surgery.errors import ModelError
from surgery.models.layouts import Family, HeadSlices, Streams, Structure
from surgery.models.mixers.attention import (
    AttentionStructure,
    DonorAttentionStructure,
    MambaSsmAttentionStructure,
    NeoXAttentionStructure,
)
from surgery.models.mixers.llamba import LlambaStructure
from surgery.models.mixers.mamba1 import FalconMambaStructure, Mamba1Structure
from surgery.models.mixers.mamba2 import FalconH1Structure, Mamba2Structure
from surgery.models.registry import FAMILIES
from surgery.types import MixerSpec, geometry_hash

STRUCTURES: dict[str, Structure] = {
    structure.kind: structure
    for structure in (
        Mamba2Structure(),
        FalconH1Structure(),
        Mamba1Structure(),
        FalconMambaStructure(),
        LlambaStructure(),
        AttentionStructure(),
        NeoXAttentionStructure(),
        MambaSsmAttentionStructure(),
        DonorAttentionStructure(),
    )
}


def family_of(config: PreTrainedConfig) -> Family:
    """Raises ModelError for a model type that no family describes; it names the nearest one."""
    for family in FAMILIES:
        if config.model_type in family.model_types:
            return family
    raise unknown_type(config.model_type)


def unknown_type(model_type: str) -> ModelError:
    """What is supported, which of it is nearest by name, and what to write for another."""
    known = [t for f in FAMILIES for t in f.model_types if not t.endswith("_hybrid")]
    near = difflib.get_close_matches(model_type, known, n=1, cutoff=0.5)
    nearest = f"The nearest is {near[0]}. " if near else ""
    hint = (
        f"No family describes it. {nearest}Supported model types: {', '.join(known)}. "
        "To add one, give surgery/models/registry.py its layout and write surgery/hybrid/modeling_<name>_hybrid.py."
    )
    return ModelError("model_type", model_type, hint)


def structure_of(spec: MixerSpec) -> Structure:
    """What is known about the kind of this mixer."""
    return STRUCTURES[spec.kind]


def mixer_of(model: PreTrainedModel, spec: MixerSpec) -> nn.Module:
    """The mixer itself."""
    return model.get_submodule(spec.path)


def block_of(model: PreTrainedModel, layer: int, spec: MixerSpec) -> nn.Module:
    """The block at `layer`, whose output is the residual stream above it; `spec` is any mixer of the model."""
    prefix = spec.path.split(".layers.")[0]
    return model.get_submodule(f"{prefix}.layers.{layer}")


def geometry_of(config: PreTrainedConfig) -> str:
    """The fingerprint of the shapes that head numbers refer to."""
    family = family_of(config)
    return geometry_hash(family.name, family.mixers(config), config.hidden_size, config.vocab_size)


__all__ = [
    "FAMILIES",
    "STRUCTURES",
    "Family",
    "HeadSlices",
    "Streams",
    "Structure",
    "block_of",
    "family_of",
    "geometry_of",
    "mixer_of",
    "structure_of",
    "unknown_type",
]
