"""Disable spliced attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from surgery.errors import ModelError
from surgery.hybrid.configuration_hybrid import is_whole
from surgery.models.hooks import hooked
from surgery.models.inserted import attention_layers
from surgery.models.lookup import family_of, mixer_of, structure_of

HEADS_OFF = "hybrid_heads_off"


@contextmanager
def heads_off(model: PreTrainedModel) -> Iterator[None]:
    """Zero the output of all spliced attention in every forward pass inside the context.

    All other weights stay as trained. With `mode: add` SSM heads still run. With `mode: replace` they stay silenced.
    With `unit: layer` the mixer of the layer adds nothing. Inserted attention blocks add nothing, and an SSM layer
    inserted below one stays.

    Raises:
        ModelError: nothing is spliced into the model, or a hook never fired.
    """
    sites = {site["layer"]: site for site in getattr(model.config, "splice", None) or []}
    blocks = attention_layers(model.config)
    if not sites and not blocks:
        raise ModelError("splice", None, "Nothing is spliced into this model. Use a hybrid.")
    specs = family_of(model.config).mixers(model.config)
    with hooked(model, specs) as hooks:
        for spec in [spec for spec in specs if spec.layer in blocks]:
            last = structure_of(spec).out_proj(mixer_of(model, spec))
            hooks.after(spec.layer, f"{spec.name} inserted", last, torch.zeros_like)
        for spec in [spec for spec in specs if spec.layer in sites]:
            mixer, whole = mixer_of(model, spec), is_whole(sites[spec.layer])
            if whole == spec.is_ssm:
                continue  # the other mixer of this layer
            last = structure_of(spec).out_proj(mixer) if whole else mixer.attention.o_proj
            hooks.after(spec.layer, f"{spec.name} spliced", last, torch.zeros_like)
        yield


__all__ = ["HEADS_OFF", "heads_off"]
