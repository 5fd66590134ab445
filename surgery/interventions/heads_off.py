"""The arms that are made from other models by taking something away. Owns: spliced attention switched off.

Must never know: prompts, scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from surgery.errors import ModelError
from surgery.hybrid.sites import is_whole
from surgery.interventions.hooks import hooked
from surgery.models.lookup import family_of, mixer_of, structure_of

HEADS_OFF = "hybrid_heads_off"


@contextmanager
def heads_off(model: PreTrainedModel) -> Iterator[None]:
    """What was spliced in adds nothing, in every forward pass that runs inside; all other weights stay as trained.

    A branch beside an SSM (`mode: add`) leaves that SSM; in `mode: replace` the silenced head stays silent; where a
    whole layer was swapped, nothing takes its place.

    Raises:
        ModelError: nothing is spliced into the model, or a hook did not fire.
    """
    sites = {site["layer"]: site for site in getattr(model.config, "splice", None) or []}
    if not sites:
        raise ModelError("splice", None, "Nothing is spliced into this model that could be switched off.")
    specs = family_of(model.config).mixers(model.config)
    with hooked(model, specs) as hooks:
        for spec in [spec for spec in specs if spec.layer in sites]:
            mixer, whole = mixer_of(model, spec), is_whole(sites[spec.layer])
            if whole == spec.is_ssm:
                continue  # another mixer of that layer
            last = structure_of(spec).out_proj(mixer) if whole else mixer.attention.o_proj
            hooks.after(spec.layer, f"{spec.name} spliced", last, torch.zeros_like)
        yield


__all__ = ["HEADS_OFF", "heads_off"]
