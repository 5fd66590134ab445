"""The paper's procedures: a model with parts of it gone, while it runs (arXiv 2504.18574).

Owns: heads off, blocks passed by, fewer layers, the last row of attention masked. Must never know: recipes, tasks, what
the numbers are for. Weights are not changed.

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

from surgery.hybrid.sites import is_whole
from surgery.interventions.hooks import Hooks, hooked
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
    """Changes the model for every forward pass that runs inside.

    Args:
        specs: every mixer of the model.
        off: by `MixerSpec.name`, heads whose contribution is removed at every token.
        layers: only so many blocks are run, from below.
        mask_last_row: what attention brings to the last token is removed: its row of the attention matrix is masked,
            in attention layers and in spliced branches.
        drop: layers whose blocks are passed by: the residual stream goes on as it came.

    Raises:
        ModelError: a hook did not fire, so that a change was not made.
    """
    with hooked(model, specs) as hooks, _cut(model, specs[0], layers):
        for spec in specs:
            if layers is not None and spec.layer >= layers:
                continue
            if spec.name in off:
                gone = torch.zeros(spec.num_heads, dtype=torch.bool, device=model.device)
                gone[list(off[spec.name])] = True
                out_proj = structure_of(spec).out_proj(mixer_of(model, spec))
                hooks.before(spec.layer, f"{spec.name} out_proj", out_proj, partial(_ablate, gone))
            if mask_last_row:
                for linear in _readers(model, spec):
                    hooks.before(spec.layer, f"{spec.name} last row", linear, _mask_last)
        for layer in drop:
            _pass_by(hooks, layer, block_of(model, layer, specs[0]))
        yield


def attends(config: Any, spec: MixerSpec) -> bool:
    """Whether there is attention in this mixer: its own, or that of heads spliced into it."""
    sites = getattr(config, "splice", None) or []
    return not spec.is_ssm or any(site["layer"] == spec.layer and not is_whole(site) for site in sites)


def _readers(model: PreTrainedModel, spec: MixerSpec) -> list[nn.Module]:
    """The projections that take what the attention of this mixer has read."""
    if not attends(model.config, spec):
        return []
    mixer = mixer_of(model, spec)
    return [mixer.attention.o_proj if spec.is_ssm else structure_of(spec).out_proj(mixer)]


@contextmanager
def _cut(model: PreTrainedModel, spec: MixerSpec, layers: int | None) -> Iterator[None]:
    """The model with its first blocks alone."""
    backbone = model.get_submodule(spec.path.split(".layers.")[0])
    blocks = backbone.layers
    try:
        if layers is not None:
            backbone.layers = nn.ModuleList(list(blocks)[:layers])
        yield
    finally:
        backbone.layers = blocks


def _pass_by(hooks: Hooks, layer: int, block: nn.Module) -> None:
    """What the block takes is what it gives. It runs all the same: its output tells in which form to give it."""
    taken: list[Tensor] = []

    def give(output: Any) -> Any:
        return (taken.pop(), *output[1:]) if isinstance(output, tuple) else taken.pop()

    hooks.before(layer, f"L{layer} block", block, lambda args: taken.append(args[0]))
    hooks.after(layer, f"L{layer} block's end", block, give)


def _ablate(gone_H: Tensor, args: tuple) -> tuple:
    """Zeroes heads of (B,T,I) at every token."""
    u_BTHP = args[0].unflatten(-1, (len(gone_H), -1))
    return ((u_BTHP * ~gone_H[:, None]).flatten(2), *args[1:])


def _mask_last(args: tuple) -> tuple:
    """Zeroes the last token of (B,T,I)."""
    u_BTI = args[0].clone()
    u_BTI[:, -1] = 0
    return (u_BTI, *args[1:])
