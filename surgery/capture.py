"""Reads a model while it runs, and changes single heads while it runs. Owns: every hook of the toolkit.

Must never know: probes, statistics, what the numbers are for. A hook that was set and never fired is an error: fused
kernels take raw weights, and a measurement without its intervention would be silently wrong.

Shape legend: B prompts, T tokens, D model width, I inner width (H heads of P), W variants folded into the batch: row
w*B + b of a batch is prompt b under variant w.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from surgery.errors import ModelError
from surgery.models.lookup import block_of, mixer_of, structure_of
from surgery.types import MixerSpec


@dataclass
class Trace:
    """What one forward pass showed, by `MixerSpec.name`.

    Attributes:
        heads: (B,T,I) the input of `out_proj`: every head's output, after the gated norm where there is one.
        scan: (B,T,I) the scan's output, skip included, before the gated norm; times the gate where there is none.
        projected: the output of `in_proj`.
        output: (B,T,D) the mixer's output.
        below: by layer, (B,T,D) the residual stream that its block takes.
        tuples: names of the mixers, and layers of the blocks, that put out a tuple.
    """

    heads: dict[str, Tensor] = field(default_factory=dict)
    scan: dict[str, Tensor] = field(default_factory=dict)
    projected: dict[str, Tensor] = field(default_factory=dict)
    output: dict[str, Tensor] = field(default_factory=dict)
    below: dict[int, Tensor] = field(default_factory=dict)
    tuples: set[str | int] = field(default_factory=set)

    def followed_by(self, other: Trace) -> Trace:
        """This pass and the one that went on from it, as if they were one."""
        streams = ("heads", "scan", "projected", "output", "below")
        joined = {
            name: {k: torch.cat([x, getattr(other, name)[k]], 1) for k, x in getattr(self, name).items()}
            for name in streams
        }
        return Trace(**joined, tuples=self.tuples)


class Hooks:
    """Forward hooks that are removed together, and that must all have fired.

    Some models use one module in several layers; a hook acts only while its own layer runs.
    """

    def __init__(self) -> None:
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._waiting: set[str] = set()
        self._layer = -1

    def enter(self, layer: int, block: nn.Module) -> None:
        """Takes note when the block of `layer` begins."""

        def hook(_: nn.Module, __: tuple) -> None:
            self._layer = layer

        self._handles.append(block.register_forward_pre_hook(hook))

    def before(self, layer: int, name: str, module: nn.Module, change: Callable[[tuple], tuple | None]) -> None:
        """`change` sees the module's arguments and may replace them."""

        def hook(_: nn.Module, args: tuple) -> tuple | None:
            if self._layer != layer:
                return None
            self._waiting.discard(name)
            return change(args)

        self._waiting.add(name)
        self._handles.append(module.register_forward_pre_hook(hook))

    def after(self, layer: int, name: str, module: nn.Module, see: Callable[[Any], Any]) -> None:
        """`see` gets the module's output and may replace it."""

        def hook(_: nn.Module, __: tuple, output: Any) -> Any:
            if self._layer != layer:
                return None
            self._waiting.discard(name)
            return see(output)

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
def hooked(model: PreTrainedModel, specs: Sequence[MixerSpec]) -> Iterator[Hooks]:
    """Hooks for the forward passes that run inside. Raises ModelError when one of them did not fire."""
    hooks = Hooks()
    for layer in range(model.config.num_hidden_layers):
        hooks.enter(layer, block_of(model, layer, specs[0]))
    try:
        yield hooks
    finally:
        hooks.remove()
    hooks.check()


@contextmanager
def record(model: PreTrainedModel, specs: Sequence[MixerSpec]) -> Iterator[Trace]:
    """Fills a `Trace` from the forward pass that runs inside. Raises ModelError when a hook did not fire."""
    trace = Trace()
    with hooked(model, specs) as hooks:
        for spec in specs:
            mixer, structure, layer, name = mixer_of(model, spec), structure_of(spec), spec.layer, spec.name
            out_proj, reader = structure.out_proj(mixer), structure.scan_reader(mixer)
            hooks.before(layer, f"{name} out_proj", out_proj, partial(_keep_input, trace.heads, name))
            hooks.before(layer, f"{name} scan", reader, partial(_keep_input, trace.scan, name))
            in_proj = structure.in_proj(mixer)
            if in_proj is not None:
                hooks.after(layer, f"{name} in_proj", in_proj, partial(_keep_output, trace.projected, name))
            hooks.after(layer, f"{name} mixer", mixer, partial(_keep_form, trace.output, trace.tuples, name))
            block = block_of(model, layer, spec)
            hooks.before(layer, f"L{layer} block", block, partial(_keep_input, trace.below, layer))
        for layer in range(model.config.num_hidden_layers):
            block, seen = block_of(model, layer, specs[0]), partial(_keep_form, {}, trace.tuples, layer)
            hooks.after(layer, f"L{layer} block's end", block, seen)
        yield trace


def _keep_input(store: dict[Any, Tensor], name: str | int, args: tuple) -> None:
    store[name] = args[0].detach()


def _keep_output(store: dict[Any, Tensor], name: str | int, output: Tensor) -> None:
    store[name] = output.detach()


def _keep_form(store: dict[Any, Tensor], tuples: set[str | int], name: str | int, output: Any) -> None:
    """As `_keep_output`, of what may be a tuple."""
    if isinstance(output, tuple):
        tuples.add(name)
    store[name] = (output[0] if isinstance(output, tuple) else output).detach()


@contextmanager
def from_block(model: PreTrainedModel, spec: MixerSpec, trace: Trace, below: Tensor) -> Iterator[None]:
    """The forward pass that runs inside begins at the block of `spec`: those below it are not run.

    All else, such as masks and positions, is the model's own forward.

    Args:
        trace: of a clean pass, for the form of the blocks' outputs.
        below: (rows,T,D) the residual stream that the block takes.
    """
    with ExitStack() as patches:
        for layer in range(spec.layer):
            given = below if layer == spec.layer - 1 else None
            block = block_of(model, layer, spec)
            patches.enter_context(_instead(block, partial(_pass_by, given), layer in trace.tuples))
        yield


@contextmanager
def from_mixer(model: PreTrainedModel, spec: MixerSpec, trace: Trace, output: Tensor) -> Iterator[None]:
    """The forward pass that runs inside begins in the middle: after one mixer, whose output is given.

    The rest of its block, such as an MLP behind the mixer or a residual multiplier, is the model's own forward.

    Args:
        trace: of the clean pass on the B prompts that the W*B rows of this one repeat.
        output: (W*B,T,D) what the mixer puts out.
    """
    below = trace.below[spec.layer].repeat(len(output) // len(trace.below[spec.layer]), 1, 1)
    as_tuple = spec.name in trace.tuples
    with from_block(model, spec, trace, below), _instead(mixer_of(model, spec), lambda _: output, as_tuple):
        yield


def _pass_by(given: Tensor | None, args: tuple) -> Tensor:
    return args[0] if given is None else given


@contextmanager
def _instead(module: nn.Module, result_of: Callable[[tuple], Tensor], as_tuple: bool) -> Iterator[None]:
    """Replaces the forward of one module object for its first call; layers above may use the same module.

    Args:
        result_of: gets the positional arguments.
    """
    original, calls = module.forward, 0

    def replaced(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            return original(*args, **kwargs)
        result = result_of(args)
        return (result, None) if as_tuple else result

    module.forward = replaced  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward  # the class's own shows again
    if not calls:
        raise ModelError("hook", type(module).__name__, "Its forward was never called, so nothing was measured.")


@contextmanager
def only_logits(model: PreTrainedModel, token_ids: Tensor) -> Iterator[None]:
    """Inside, the language model's head gives the logits of these tokens alone, in their order: (...,U).

    What a model does with its logits afterwards, such as a scale, is still its own.
    """
    head = model.get_output_embeddings()
    weight = head.weight[token_ids]
    bias = None if head.bias is None else head.bias[token_ids]
    with _instead(head, lambda args: F.linear(args[0], weight, bias), as_tuple=False):
        yield


@dataclass(frozen=True)
class PerfectRead:
    """What a head would put out at the query if it read one token alone.

    Attributes:
        heads: (W,H) bool: which heads of the mixer read perfectly, in each variant.
        value: (W,B,H,P) the token's value, scaled to the head's usual output.
    """

    heads: Tensor
    value: Tensor


@contextmanager
def intervene(
    model: PreTrainedModel,
    specs: Sequence[MixerSpec],
    ablate: Mapping[str, Tensor],
    sharpen: Mapping[str, PerfectRead],
    conv_states: Mapping[str, Tensor] | None = None,
) -> Iterator[None]:
    """Changes heads at the last token of the forward pass that runs inside, variants folded into the batch.

    Args:
        ablate: by `MixerSpec.name`, (W,H) bool: heads whose contribution is removed at the input of `out_proj`.
        sharpen: by name, the heads whose mixing row becomes one-hot; the skip stays.
        conv_states: by name, (W*B,channels,kernel), the convolution's state before this token, where decoding.
    """
    with hooked(model, specs) as hooks:
        for spec in specs:
            mixer, structure, layer, name = mixer_of(model, spec), structure_of(spec), spec.layer, spec.name
            in_proj = structure.in_proj(mixer)
            seen: dict[str, Tensor] = {}
            if name in sharpen and in_proj is not None:
                hooks.after(layer, f"{name} in_proj", in_proj, partial(_keep_output, seen, name))
            if name in sharpen:
                before = conv_states.get(name) if conv_states else None
                change = partial(_sharpen_last, mixer, spec, sharpen[name], seen, before)
                hooks.before(layer, f"{name} scan", structure.scan_reader(mixer), change)
            if name in ablate:
                out_proj = structure.out_proj(mixer)
                hooks.before(layer, f"{name} out_proj", out_proj, partial(_ablate_last, ablate[name]))
        yield


def _ablate_last(mask_WH: Tensor, args: tuple) -> tuple:
    """Zeroes heads of the last token of (W*B,T,I)."""
    W, H = mask_WH.shape
    u = args[0].clone()
    last = u[:, -1].view(W, -1, H, u.shape[-1] // H)
    last *= (~mask_WH)[:, None, :, None]
    return (u, *args[1:])


def _sharpen_last(
    mixer: nn.Module, spec: MixerSpec, read: PerfectRead, seen: dict[str, Tensor], before: Tensor | None, args: tuple
) -> tuple:
    """Replaces what is mixed in at the last token of (W*B,T,I); the skip stays, and so does the gate."""
    W, H = read.heads.shape
    y = args[0].clone()
    last_WBHP = y[:, -1].view(W, -1, H, y.shape[-1] // H)
    structure, value_WBHP = structure_of(spec), read.value.to(y.dtype)
    if structure.in_proj(mixer) is not None:
        streams = structure.streams(mixer, spec, seen[spec.name], before)
        value_WBHP = value_WBHP + structure.skip(mixer, streams.x[:, -1]).view(last_WBHP.shape)
        if streams.gate is not None:
            value_WBHP = value_WBHP * streams.gate[:, -1].view(last_WBHP.shape)
    last_WBHP.copy_(torch.where(read.heads[:, None, :, None], value_WBHP.to(y.dtype), last_WBHP))
    return (y, *args[1:])


def mixed_at_query(model: PreTrainedModel, spec: MixerSpec, trace: Trace) -> Tensor:
    """(B,H,P) what each head mixes in at the last token of a recorded pass: its scan without the skip and the gate."""
    mixer, structure = mixer_of(model, spec), structure_of(spec)
    scan_BHP = trace.scan[spec.name][:, -1].unflatten(-1, (spec.num_heads, spec.head_dim))
    if structure.in_proj(mixer) is None:
        return scan_BHP
    streams = structure.streams(mixer, spec, trace.projected[spec.name])
    if streams.gate is not None:
        gate_BHP = streams.gate[:, -1].view(scan_BHP.shape)
        scan_BHP = torch.where(gate_BHP == 0, 0, scan_BHP / gate_BHP)
    return scan_BHP - structure.skip(mixer, streams.x[:, -1])


def values_at(model: PreTrainedModel, spec: MixerSpec, trace: Trace, cache: Cache, places: Tensor) -> Tensor:
    """(B,H,P) the value of every head at one token of each prompt.

    Args:
        cache: of the recorded prompts; attention keeps its values there.
        places: (B,) token indices.
    """
    mixer, structure, rows = mixer_of(model, spec), structure_of(spec), torch.arange(len(places), device=places.device)
    if structure.in_proj(mixer) is not None:
        return structure.streams(mixer, spec, trace.projected[spec.name]).x[rows, places]
    values_BGP = cache.layers[spec.layer].values[rows, :, places]
    return values_BGP.repeat_interleave(spec.num_heads // spec.num_groups, dim=1)


def expand_cache(cache: Cache, variants: int, first: int = 0) -> Cache:
    """A copy of the cache for W variants of every row: B rows become W*B, variant-major.

    Args:
        first: layers below it are not going to be run, and are left as they are.
    """
    expanded = copy.copy(cache)
    expanded.layers = []
    for index, layer in enumerate(cache.layers):
        new = copy.copy(layer)
        if index < first:
            expanded.layers.append(new)
            continue
        for name, value in vars(layer).items():
            if isinstance(value, Tensor) and value.ndim > 1:  # keys and values
                setattr(new, name, _repeat(value, variants))
            elif isinstance(value, dict):  # states by index
                setattr(new, name, {k: _repeat(v, variants) if isinstance(v, Tensor) else v for k, v in value.items()})
        expanded.layers.append(new)
    return expanded


def _repeat(x: Tensor, variants: int) -> Tensor:
    return x.repeat(variants, *([1] * (x.ndim - 1)))
