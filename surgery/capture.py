"""Reads a model while it runs, and changes single heads while it runs. Owns: every hook of the toolkit.

Must never know: probes, statistics, what the numbers are for. A hook that was set and never fired is an error: fused
kernels take raw weights, and a measurement without its intervention would be silently wrong.

Shape legend: B prompts, T tokens, D model width, I inner width (H heads of P), W variants folded into the batch: row
w*B + b of a batch is prompt b under variant w.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from surgery.errors import ModelError
from surgery.families import Family, Streams


@dataclass
class Trace:
    """What one forward pass showed, by layer.

    Attributes:
        heads: (B,T,I) the input of `out_proj`: every head's output after the gated norm.
        scan: (B,T,I) the scan's output before the gated norm, skip included.
        projected: the output of `in_proj`.
        residual: (B,T,D) the residual stream above the layer.
    """

    heads: dict[int, Tensor] = field(default_factory=dict)
    scan: dict[int, Tensor] = field(default_factory=dict)
    projected: dict[int, Tensor] = field(default_factory=dict)
    residual: dict[int, Tensor] = field(default_factory=dict)


class _Hooks:
    """Forward hooks that are removed together, and that must all have fired."""

    def __init__(self) -> None:
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._waiting: set[str] = set()

    def before(self, name: str, module: nn.Module, change: Callable[[tuple], tuple | None]) -> None:
        def hook(_: nn.Module, args: tuple) -> tuple | None:
            self._waiting.discard(name)
            return change(args)

        self._waiting.add(name)
        self._handles.append(module.register_forward_pre_hook(hook))

    def after(self, name: str, module: nn.Module, see: Callable[[Tensor], None]) -> None:
        def hook(_: nn.Module, __: tuple, output: Tensor) -> None:
            self._waiting.discard(name)
            see(output)

        self._waiting.add(name)
        self._handles.append(module.register_forward_hook(hook))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def check(self) -> None:
        if self._waiting:
            hint = "A fused kernel bypasses it, so nothing was measured. Run without that kernel, in eval mode."
            raise ModelError("hook", sorted(self._waiting)[0], hint)


@contextmanager
def _hooks() -> Iterator[_Hooks]:
    hooks = _Hooks()
    try:
        yield hooks
    finally:
        hooks.remove()
    hooks.check()


@contextmanager
def record(model: PreTrainedModel, family: Family, layers: Sequence[int]) -> Iterator[Trace]:
    """Fills a `Trace` from the forward pass that runs inside. Raises ModelError when a hook did not fire."""
    trace = Trace()
    with _hooks() as hooks:
        for layer in layers:
            mixer = family.mixer(model, layer)
            hooks.before(f"L{layer} out_proj", family.out_proj(mixer), partial(_keep_input, trace.heads, layer))
            hooks.before(f"L{layer} norm", family.gated_norm(mixer), partial(_keep_input, trace.scan, layer))
            hooks.after(f"L{layer} in_proj", family.in_proj(mixer), partial(_keep_output, trace.projected, layer))
            hooks.after(f"L{layer} block", family.block(model, layer), partial(_keep_output, trace.residual, layer))
        yield trace


def _keep_input(store: dict[int, Tensor], layer: int, args: tuple) -> None:
    store[layer] = args[0].detach()


def _keep_output(store: dict[int, Tensor], layer: int, output: Tensor) -> None:
    store[layer] = output.detach()


@dataclass(frozen=True)
class PerfectRead:
    """What a head would put out at the query if it read one token alone.

    Attributes:
        heads: (W,H) bool: which heads of the layer read perfectly, in each variant.
        value: (W,B,H,P) the token's value, scaled to the head's usual output.
    """

    heads: Tensor
    value: Tensor


@contextmanager
def intervene(
    model: PreTrainedModel,
    family: Family,
    ablate: Mapping[int, Tensor],
    sharpen: Mapping[int, PerfectRead],
    conv_states: Mapping[int, Tensor] | None = None,
) -> Iterator[None]:
    """Changes heads at the last token of the forward pass that runs inside, variants folded into the batch.

    Args:
        ablate: by layer, (W,H) bool: heads whose contribution is removed after the gated norm.
        sharpen: by layer, the heads whose mixing row becomes one-hot; the skip D stays.
        conv_states: by layer, (W*B,channels,kernel), the convolution state before this token, where decoding.
    """
    with _hooks() as hooks:
        for layer, mask in ablate.items():
            out_proj = family.out_proj(family.mixer(model, layer))
            hooks.before(f"L{layer} out_proj", out_proj, partial(_ablate_last, mask))
        seen: dict[int, Tensor] = {}
        for layer, read in sharpen.items():
            mixer = family.mixer(model, layer)
            state = conv_states[layer] if conv_states else None
            hooks.after(f"L{layer} in_proj", family.in_proj(mixer), partial(_keep_output, seen, layer))

            def streams(layer: int = layer, mixer: nn.Module = mixer, state: Tensor | None = state) -> Streams:
                return family.streams(mixer, seen[layer], state)

            change = partial(_sharpen_last, mixer, read, streams)
            hooks.before(f"L{layer} norm", family.gated_norm(mixer), change)
        yield


def _ablate_last(mask_WH: Tensor, args: tuple) -> tuple:
    """Zeroes heads of the last token of (W*B,T,I)."""
    W, H = mask_WH.shape
    u = args[0].clone()
    last = u[:, -1].view(W, -1, H, u.shape[-1] // H)
    last *= (~mask_WH)[:, None, :, None]
    return (u, *args[1:])


def _sharpen_last(mixer: nn.Module, read: PerfectRead, streams: Callable[[], Streams], args: tuple) -> tuple:
    """Replaces the mixed part of the scan's output at the last token of (W*B,T,I); the skip D x stays."""
    W, H = read.heads.shape
    y = args[0].clone()
    last_WBHP = y[:, -1].view(W, -1, H, y.shape[-1] // H)
    skip_WBHP = (mixer.D[:, None] * streams().x[:, -1]).view(last_WBHP.shape)
    last_WBHP.copy_(torch.where(read.heads[:, None, :, None], read.value.to(y.dtype) + skip_WBHP, last_WBHP))
    return (y, *args[1:])


def expand_cache(cache: Cache, variants: int) -> Cache:
    """A copy of the cache for W variants of every row: B rows become W*B, variant-major."""
    expanded = copy.copy(cache)
    expanded.layers = []
    for layer in cache.layers:
        new = copy.copy(layer)
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name)
            setattr(new, name, {i: s if s is None else _repeat(s, variants) for i, s in states.items()})
        new.has_previous_state = dict(layer.has_previous_state)
        if isinstance(getattr(layer, "keys", None), Tensor):
            new.keys, new.values = _repeat(layer.keys, variants), _repeat(layer.values, variants)
        expanded.layers.append(new)
    return expanded


def _repeat(x: Tensor, variants: int) -> Tensor:
    return x.repeat(variants, *([1] * (x.ndim - 1)))
