"""Run a model with parts removed, as in the paper's experiments (arXiv 2504.18574). Weights are not changed.

Shape legend: B prompts, T tokens, D model width, I inner width (H heads of P).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.hybrid.configuration_hybrid import is_whole
from surgery.models.hooks import Hooks, hooked
from surgery.models.lookup import block_of, mixer_of, structure_of
from surgery.types import MixerSpec


@contextmanager
def altered(
    model: PreTrainedModel,
    specs: Sequence[MixerSpec],
    off: Mapping[str, Sequence[int]],
    layers: int | None = None,
    mask_last_row: bool = False,
    drop: Sequence[int] = (),
) -> Iterator[None]:
    """Change the model for every forward pass inside the context.

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
    with hooked(model, specs) as hooks, _cut(model, specs[0], layers):
        for spec in specs:
            if layers is not None and spec.layer >= layers:
                continue
            if spec.name in off:
                mask = torch.zeros(spec.num_heads, dtype=torch.bool, device=model.device)
                mask[list(off[spec.name])] = True
                out_proj = structure_of(spec).out_proj(mixer_of(model, spec))
                hooks.before(spec.layer, f"{spec.name} out_proj", out_proj, partial(_ablate, mask))
            if mask_last_row and attends(model.config, spec):
                mixer = mixer_of(model, spec)
                o_proj = mixer.attention.o_proj if spec.is_ssm else structure_of(spec).out_proj(mixer)
                hooks.before(spec.layer, f"{spec.name} last row", o_proj, _mask_last)
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
        if layers is not None:
            backbone.layers = nn.ModuleList(list(blocks)[:layers])
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


def _ablate(mask_H: Tensor, args: tuple) -> tuple:
    """Zero heads of (B,T,I) at every token."""
    u_BTHP = args[0].unflatten(-1, (len(mask_H), -1))
    return ((u_BTHP * ~mask_H[:, None]).flatten(2), *args[1:])


def _mask_last(args: tuple) -> tuple:
    """Zero the last token of (B,T,I)."""
    u_BTI = args[0].clone()
    u_BTI[:, -1] = 0
    return (u_BTI, *args[1:])
