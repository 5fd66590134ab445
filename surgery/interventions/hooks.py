"""Reads a model while it runs, and changes single heads while it runs. Owns: every hook of the toolkit.

Must never know: probes, statistics, what the numbers are for. A hook that was set and never fired is an error: fused
kernels take raw weights, and a measurement without its intervention would be silently wrong.

Shape legend: B prompts, T tokens, D model width, I inner width (H heads of P), W variants folded into the batch: row
w*B + b of a batch is prompt b under variant w.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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
