"""One file for each mixer structure, and the way from a config to its family."""

from __future__ import annotations

from transformers import PreTrainedConfig

from surgery.errors import ModelError
from surgery.families.base import Family, HeadSlices, Streams
from surgery.families.mamba2 import Mamba2Family
from surgery.heads import geometry_hash

FAMILIES: tuple[Family, ...] = (Mamba2Family(),)


def family_of(config: PreTrainedConfig) -> Family:
    """Raises ModelError for a model type that no family describes."""
    for family in FAMILIES:
        if config.model_type in family.model_types:
            return family
    known = ", ".join(t for f in FAMILIES for t in f.model_types)
    hint = f"It has no SSM mixers that this toolkit knows. Supported model types: {known}."
    raise ModelError("model_type", config.model_type, hint)


def geometry_of(config: PreTrainedConfig) -> str:
    """The fingerprint of the shapes that head numbers refer to."""
    return geometry_hash(family_of(config).mixers(config), config.hidden_size, config.vocab_size)


__all__ = ["FAMILIES", "Family", "HeadSlices", "Streams", "family_of", "geometry_of"]
