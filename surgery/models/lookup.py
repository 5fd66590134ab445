"""Look up the family of a config, the structure of a mixer, and modules of a model."""

from __future__ import annotations

import difflib

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from surgery.errors import ModelError
from surgery.models.layouts import STRUCTURES, Family, Structure
from surgery.models.registry import families
from surgery.types import MixerSpec, geometry_hash


def find_family(model_type: str) -> Family | None:
    """Return the family that has this model type; None if no family has it."""
    return next((family for family in families() if model_type in family.model_types), None)


def family_of(config: PreTrainedConfig) -> Family:
    """Return the family of a config. Raises ModelError for an unknown model type, and suggests the nearest."""
    family = find_family(config.model_type)
    if family is None:
        raise unknown_type(config.model_type)
    return family


def unknown_type(model_type: str) -> ModelError:
    """Return the error for a model type without a family. It lists what is supported and how to add a family."""
    known = [t for family in families() for t in family.model_types if not t.endswith("_hybrid")]
    near = difflib.get_close_matches(model_type, known, n=1, cutoff=0.5)
    nearest = f"Did you mean {near[0]}? " if near else ""
    hint = (
        f"This model type is not supported. {nearest}Supported: {', '.join(known)}. "
        "To add one, see 'A model family' in docs/EXTENDING.md."
    )
    return ModelError("model_type", model_type, hint)


def structure_of(spec: MixerSpec) -> Structure:
    """Return the structure of a mixer."""
    return STRUCTURES[spec.kind]


def mixer_of(model: PreTrainedModel, spec: MixerSpec) -> nn.Module:
    """Return the module of a mixer."""
    return model.get_submodule(spec.path)


def block_of(model: PreTrainedModel, layer: int, spec: MixerSpec) -> nn.Module:
    """Return the block of a layer, whose output is the residual stream.

    Args:
        spec: any mixer of the model; its path shows where the blocks are.
    """
    prefix = spec.path.split(".layers.")[0]
    return model.get_submodule(f"{prefix}.layers.{layer}")


def geometry_of(config: PreTrainedConfig) -> str:
    """Return the fingerprint of the shapes that head numbers refer to."""
    family = family_of(config)
    return geometry_hash(family.name, family.mixers(config), config.hidden_size, config.vocab_size)
