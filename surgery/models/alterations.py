"""Run a model with parts removed, as in the paper's experiments (arXiv 2504.18574), or silence heads permanently.

Shape legend: B prompts, T tokens, H heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.errors import ModelError
from surgery.hybrid.configuration_hybrid import is_whole
from surgery.models.hooks import Hooks, hooked, replace_heads
from surgery.models.inserted import attention_layers
from surgery.models.lookup import block_of, family_of, mixer_of, structure_of
from surgery.types import Graft, MixerSpec

HEADS_OFF = "hybrid_heads_off"


@contextmanager
def altered(
    model: PreTrainedModel,
    specs: Sequence[MixerSpec],
    off: Mapping[str, Sequence[int]],
    layers: int | None = None,
    mask_last_row: bool = False,
    drop: Sequence[int] = (),
) -> Iterator[None]:
    """Change the model for every forward pass inside the context. Weights are not changed.

    Args:
        specs: all mixers of the model.
        off: by `MixerSpec.name`, indices of heads to ablate at every token.
        layers: number of blocks to run, from the lowest up; all by default.
        mask_last_row: mask the last row of every attention matrix, in attention layers and in spliced heads, so that
            attention adds nothing at the last token.
        drop: layers to skip: the residual stream passes unchanged.

    Raises:
        ModelError: a hook never fired, so a change was not applied.
    """
    every = torch.ones(1, 1, dtype=torch.bool, device=model.device)
    with hooked(model, specs) as hooks, _cut(model, specs[0], layers):
        for spec in specs:
            if layers is not None and spec.layer >= layers:
                continue
            if spec.name in off:
                heads_1H = torch.zeros(1, spec.num_heads, dtype=torch.bool, device=model.device)
                heads_1H[:, list(off[spec.name])] = True
                out_proj = structure_of(spec).out_proj(mixer_of(model, spec))
                hooks.before(
                    spec.layer, f"{spec.name} out_proj", out_proj, partial(replace_heads, heads_1H, every, None)
                )
            if mask_last_row and attends(model.config, spec):
                mixer = mixer_of(model, spec)
                o_proj = mixer.attention.o_proj if spec.is_ssm else structure_of(spec).out_proj(mixer)
                hooks.before(spec.layer, f"{spec.name} last row", o_proj, partial(replace_heads, every, None, None))
        for layer in drop:
            _skip(hooks, layer, block_of(model, layer, specs[0]))
        yield


def attends(config: Any, spec: MixerSpec) -> bool:
    """Whether a mixer is attention, or has attention spliced into it."""
    sites = getattr(config, "splice", None) or []
    return not spec.is_ssm or any(site["layer"] == spec.layer and not is_whole(site) for site in sites)


@contextmanager
def _cut(model: PreTrainedModel, spec: MixerSpec, layers: int | None) -> Iterator[None]:
    """Run only the first `layers` blocks."""
    backbone = model.get_submodule(spec.path.split(".layers.")[0])
    blocks = backbone.layers
    try:
        backbone.layers = blocks if layers is None else nn.ModuleList(list(blocks)[:layers])
        yield
    finally:
        backbone.layers = blocks


def _skip(hooks: Hooks, layer: int, block: nn.Module) -> None:
    """Replace the block's output by its input. The block still runs, since its output shows the expected form."""
    inputs: list[Tensor] = []

    def pass_input(output: Any) -> Any:
        return (inputs.pop(), *output[1:]) if isinstance(output, tuple) else inputs.pop()

    hooks.before(layer, f"L{layer} block", block, lambda args: inputs.append(args[0]))
    hooks.after(layer, f"L{layer} block's end", block, pass_input)


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
        for spec in specs:
            whole = spec.layer in blocks or (spec.layer in sites and is_whole(sites[spec.layer]))
            if (spec.layer not in sites and not whole) or whole == spec.is_ssm:
                continue  # with another mixer of this layer
            mixer = mixer_of(model, spec)
            last = structure_of(spec).out_proj(mixer) if whole else mixer.attention.o_proj
            hooks.after(spec.layer, f"{spec.name} spliced", last, torch.zeros_like)
        yield


@torch.no_grad()
def silence(out_proj: nn.Linear, graft: Graft) -> None:
    """Zero the heads' columns of `out_proj`. Training keeps them at zero. Call it again after merging adapters."""
    for head in graft.heads:
        out_proj.weight[:, structure_of(graft.site).weight_slices(graft.site, head).out] = 0
