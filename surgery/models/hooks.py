"""Record activations, start a forward pass above a layer, and set hooks that must fire.

A hook that never fires raises an error. Fused kernels use raw weights and bypass hooks, and a measurement without its
intervention would be silently wrong.

Shape legend: B prompts, T tokens, D model width, I inner width (H heads of P), W variants folded into the batch: row
w*B + b of a batch is prompt b under variant w.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.errors import ModelError
from surgery.models.lookup import block_of, mixer_of, structure_of
from surgery.types import MixerSpec


@dataclass
class ActivationCache:
    """Activations of one forward pass, by `MixerSpec.name`.

    Attributes:
        heads: (B,T,I) input of `out_proj`: every head's output, after the gated norm if there is one.
        scan: (B,T,I) output of the scan, including the skip, before the gated norm; times the gate if there is no norm.
        projected: the output of `in_proj`.
        output: (B,T,D) the mixer's output.
        residual: by layer, (B,T,D) the input of the block (residual stream).
        tuples: mixers (by name) and blocks (by layer) whose output is a tuple.
        tokens: (B,M) the tokens of the prompt that `projected` holds, if it does not hold all of them.
    """

    heads: dict[str, Tensor] = field(default_factory=dict)
    scan: dict[str, Tensor] = field(default_factory=dict)
    projected: dict[str, Tensor] = field(default_factory=dict)
    output: dict[str, Tensor] = field(default_factory=dict)
    residual: dict[int, Tensor] = field(default_factory=dict)
    tuples: set[str | int] = field(default_factory=set)
    tokens: Tensor | None = None

    def projected_at(self, name: str, places_BK: Tensor) -> Tensor:
        """(B,K,...) the output of `in_proj` at these tokens of the prompt, which it must hold."""
        if self.tokens is not None:
            places_BK = (self.tokens[:, None] == places_BK[..., None]).long().argmax(-1)
        return self.projected[name][torch.arange(len(places_BK), device=places_BK.device)[:, None], places_BK]

    def after(self, earlier: ActivationCache, place: int) -> ActivationCache:
        """This pass of the token at `place`, with what `record_projected` kept of the tokens before it."""
        assert earlier.tokens is not None
        projected = {k: torch.cat([kept, self.projected[k]], 1) for k, kept in earlier.projected.items()}
        tokens = F.pad(earlier.tokens, (0, 1), value=place)
        return replace(self, projected=projected, tokens=tokens)


class Hooks:
    """Forward hooks that are removed together and must all fire.

    Some models use one module in several layers, so a hook acts only while its own layer runs.
    """

    def __init__(self) -> None:
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._waiting: set[str] = set()
        self._layer = -1

    def enter(self, layer: int, block: nn.Module) -> None:
        """Set a hook that records when the block of `layer` starts."""

        def hook(_: nn.Module, __: tuple) -> None:
            self._layer = layer

        self._handles.append(block.register_forward_pre_hook(hook))

    def before(self, layer: int, name: str, module: nn.Module, change: Callable[[tuple], tuple | None]) -> None:
        """Set a hook before a module runs in a layer. `name` is in the error if it never fires.

        `change` is a function of the positional arguments. Its result replaces them, unless it is None.
        """
        self._handles.append(module.register_forward_pre_hook(self._acting(layer, name, change)))

    def after(self, layer: int, name: str, module: nn.Module, change: Callable[[Any], Any]) -> None:
        """Set a hook after a module has run, like `before`. `change` is a function of the output."""
        self._handles.append(module.register_forward_hook(self._acting(layer, name, change)))

    def _acting(self, layer: int, name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
        def hook(*arguments: Any) -> Any:
            if self._layer != layer:
                return None
            self._waiting.discard(name)
            return change(arguments[-1])

        self._waiting.add(name)
        return hook

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def check(self) -> None:
        """Raise ModelError if a hook never fired."""
        if self._waiting:
            hint = "A fused kernel bypasses this module, so nothing was measured. "
            hint += "Run without that kernel, in eval mode."
            raise ModelError("hook", sorted(self._waiting)[0], hint)


@contextmanager
def hooked(model: PreTrainedModel, specs: Sequence[MixerSpec]) -> Iterator[Hooks]:
    """Set hooks for the forward passes inside the context.

    Raises:
        ModelError: a hook never fired.
    """
    hooks = Hooks()
    for layer in range(model.config.num_hidden_layers):
        hooks.enter(layer, block_of(model, layer, specs[0]))
    try:
        yield hooks
    finally:
        hooks.remove()
    hooks.check()


@contextmanager
def record(model: PreTrainedModel, specs: Sequence[MixerSpec]) -> Iterator[ActivationCache]:
    """Record the forward pass inside the context.

    Yields:
        A cache that the pass fills, for the mixers of `specs`.

    Raises:
        ModelError: a hook never fired.
    """
    cache = ActivationCache()
    with hooked(model, specs) as hooks:
        for spec in specs:
            mixer, structure, layer, name = mixer_of(model, spec), structure_of(spec), spec.layer, spec.name
            out_proj, reader = structure.out_proj(mixer), structure.scan_reader(mixer)
            hooks.before(layer, f"{name} out_proj", out_proj, partial(store_input, cache.heads, name))
            hooks.before(layer, f"{name} scan", reader, partial(store_input, cache.scan, name))
            in_proj = structure.in_proj(mixer)
            if in_proj is not None:
                hooks.after(layer, f"{name} in_proj", in_proj, partial(store_output, cache.projected, name))
            hooks.after(layer, f"{name} mixer", mixer, partial(_store_first, cache.output, cache.tuples, name))
            block = block_of(model, layer, spec)
            hooks.before(layer, f"L{layer} block", block, partial(store_input, cache.residual, layer))
        for layer in range(model.config.num_hidden_layers):
            note = partial(_store_first, {}, cache.tuples, layer)
            hooks.after(layer, f"L{layer} block's end", block_of(model, layer, specs[0]), note)
        yield cache


@contextmanager
def record_projected(
    model: PreTrainedModel, specs: Sequence[MixerSpec], tokens_BM: Tensor
) -> Iterator[ActivationCache]:
    """Record the output of `in_proj` alone, at some tokens of the forward pass inside the context.

    Yields:
        A cache that the pass fills, for the mixers of `specs` with an `in_proj`.

    Raises:
        ModelError: a hook never fired.
    """
    cache, rows = ActivationCache(tokens=tokens_BM), torch.arange(len(tokens_BM), device=tokens_BM.device)[:, None]

    def store(name: str, output: Tensor) -> None:
        cache.projected[name] = output.detach()[rows, tokens_BM]

    with hooked(model, specs) as hooks:
        for spec in specs:
            in_proj = structure_of(spec).in_proj(mixer_of(model, spec))
            if in_proj is not None:
                hooks.after(spec.layer, f"{spec.name} in_proj", in_proj, partial(store, spec.name))
        yield cache


def store_input(store: dict[Any, Tensor], name: str | int, args: tuple) -> None:
    """Hook that stores a module's first argument under `name`."""
    store[name] = args[0].detach()


def store_output(store: dict[Any, Tensor], name: str | int, output: Tensor) -> None:
    """Hook that stores a module's output under `name`."""
    store[name] = output.detach()


def replace_heads(heads_WH: Tensor, tokens_BT: Tensor | None, fill: Tensor | None, args: tuple) -> tuple:
    """Hook before `out_proj` that replaces heads of (W*B,T,I).

    Args:
        heads_WH: bool, heads to replace in each variant.
        tokens_BT: bool, tokens at which to replace them; None for the last one.
        fill: the new values, which broadcast to (B,T,I); None for zeros.
    """
    W, H = heads_WH.shape
    u_WBTHP = args[0].unflatten(0, (W, -1)).unflatten(-1, (H, -1))
    if tokens_BT is None:
        T = u_WBTHP.shape[2]
        tokens_BT = torch.arange(T, device=u_WBTHP.device)[None] == T - 1
    mask_WBTH = heads_WH[:, None, None] & tokens_BT[None, :, :, None]
    values = 0 if fill is None else fill.unflatten(-1, (H, -1)).to(u_WBTHP.dtype)
    return (torch.where(mask_WBTH[..., None], values, u_WBTHP).flatten(3).flatten(0, 1), *args[1:])


def _store_first(store: dict[Any, Tensor], tuples: set[str | int], name: str | int, output: Any) -> None:
    """Hook that stores an output, or the first entry of a tuple. Adds the name to `tuples` for a tuple."""
    if isinstance(output, tuple):
        tuples.add(name)
    store[name] = (output[0] if isinstance(output, tuple) else output).detach()


@contextmanager
def from_block(
    model: PreTrainedModel, spec: MixerSpec, activations: ActivationCache, residual: Tensor
) -> Iterator[None]:
    """Start the forward pass inside the context at the block of `spec`, without running the blocks below.

    Masks, positions and everything else are computed by the model's own forward.

    Args:
        spec: mixer of the block to start at.
        activations: activations of a clean pass, for the form of the blocks' outputs.
        residual: (rows,T,D) input of the block (residual stream).
    """
    with ExitStack() as patches:
        for layer in range(spec.layer):
            block, as_tuple = block_of(model, layer, spec), layer in activations.tuples
            if layer == spec.layer - 1:
                patches.enter_context(replaced_once(block, lambda _: residual, as_tuple))
            else:
                patches.enter_context(replaced_once(block, lambda x: x, as_tuple))
        yield


@contextmanager
def from_mixer(model: PreTrainedModel, spec: MixerSpec, activations: ActivationCache, output: Tensor) -> Iterator[None]:
    """Start the forward pass inside the context after one mixer, with the given output of it.

    The rest of its block, such as an MLP or a residual multiplier, is computed by the model's own forward.

    Args:
        spec: the mixer.
        activations: activations of the clean pass on the B prompts, which the W*B rows of this pass repeat.
        output: (W*B,T,D) output of the mixer.
    """
    residual = activations.residual[spec.layer]
    residual = residual.repeat(len(output) // len(residual), 1, 1)
    as_tuple = spec.name in activations.tuples
    with (
        from_block(model, spec, activations, residual),
        replaced_once(mixer_of(model, spec), lambda _: output, as_tuple),
    ):
        yield


@contextmanager
def replaced_once(
    module: nn.Module, result_of: Callable[[Tensor], Tensor], as_tuple: bool, method: str = "forward"
) -> Iterator[None]:
    """Replace a method of a module for its first call only, since layers above may use the same module.

    Args:
        result_of: function from the first argument, or the one named `hidden_states`, to the output.
        as_tuple: return the output as the first entry of a tuple.
        method: method to replace.

    Raises:
        ModelError: the method was never called.
    """
    original, own, calls = getattr(module, method), vars(module).get(method), 0

    def replaced(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            return original(*args, **kwargs)
        result = result_of(args[0] if args else kwargs["hidden_states"])
        return (result, None) if as_tuple else result

    setattr(module, method, replaced)
    try:
        yield
    finally:
        delattr(module, method)  # restores that of the class
        if own is not None:  # such as a hook of Accelerate
            setattr(module, method, own)
    if not calls:
        hint = f"Its {method} was never called, so nothing was measured. Run without fused kernels."
        raise ModelError("hook", type(module).__name__, hint)


@contextmanager
def only_logits(model: PreTrainedModel, token_ids: Tensor) -> Iterator[None]:
    """Compute only the logits of some tokens inside the context: (...,U).

    Later steps of the model, such as a scale of the logits, are unchanged.

    Args:
        token_ids: (U,) tokens, in the order of the logits.
    """
    head = model.get_output_embeddings()
    weight = head.weight[token_ids]
    bias = None if head.bias is None else head.bias[token_ids]
    with replaced_once(head, lambda x: F.linear(x, weight, bias), as_tuple=False):
        yield
