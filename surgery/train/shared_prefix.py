"""Share weights and computation between the model and the frozen base.

If only new heads train, all layers below the lowest new head are equal to the base's. Their weights are stored once,
and they run once for both models, without an autograd graph.

Shape legend: B documents, T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.models.hooks import ActivationCache, from_block
from surgery.models.lookup import block_of, family_of

# The bases that store weights in a model's memory. They do so after training too: copies of a large base may not fit.
_BASES: WeakKeyDictionary[nn.Module, WeakSet[nn.Module]] = WeakKeyDictionary()


def share_weights(model: nn.Module, base: nn.Module) -> None:
    """Store frozen parameters that are equal in both models once, in the model's memory, until `unshare_bases`."""
    base_parameters = dict(base.named_parameters())
    for name, parameter in model.named_parameters():
        other = base_parameters.get(name.replace(".base_layer", ""))  # of a layer with an adapter
        if other is None or parameter.requires_grad or other.data_ptr() == parameter.data_ptr():
            continue
        alike = (other.shape, other.dtype, other.device) == (parameter.shape, parameter.dtype, parameter.device)
        if alike and torch.equal(other, parameter):
            other.data = parameter.data
    _BASES.setdefault(model, WeakSet()).add(base)


def unshare_bases(model: nn.Module) -> None:
    """Undo `share_weights` for all bases. Call it before optimizer steps or merging change the model's weights."""
    for base in _BASES.pop(model, ()):
        unshare_weights(model, base)


def unshare_weights(model: nn.Module, base: nn.Module) -> None:
    """Copy the tensors that the base shares with the model."""
    shared = {parameter.data_ptr() for parameter in model.parameters()}
    for parameter in base.parameters():
        if parameter.data_ptr() in shared:
            parameter.data = parameter.data.clone()


class SharedPrefix:
    """Run the layers below the lowest trainable one once for base and model.

    Args:
        layer: the first layer that runs in both models. They share the weights below it.
    """

    def __init__(self, model: PreTrainedModel, base: PreTrainedModel, layer: int) -> None:
        self.model, self.base, self.layer = model, base, layer
        self._spec = family_of(model.config).mixers(model.config)[layer]
        self._below: Tensor | None = None
        self._tuples: set[str | int] = set()

    @classmethod
    def of(cls, model: PreTrainedModel, base: PreTrainedModel) -> SharedPrefix | None:
        """Find the layers that both models share after `share_weights`; None if there are none."""
        mixers = family_of(model.config).mixers(model.config)
        base_mixers = family_of(base.config).mixers(base.config)
        if [spec.layer for spec in mixers] != list(range(len(mixers))) or len(base_mixers) != len(mixers):
            return None  # layers with several mixers, or with none
        common = 0
        for spec, other in zip(mixers, base_mixers, strict=True):
            if not _is_shared(block_of(model, spec.layer, spec), block_of(base, other.layer, other)):
                break
            common += 1
        embeddings = _is_shared(model.get_input_embeddings(), base.get_input_embeddings())
        return cls(model, base, common) if embeddings and 0 < common < len(mixers) else None

    @torch.no_grad()
    def base_logits(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Run the base, and record the input of `layer` for the model. Returns the logits (B,T,V) of the base."""
        self._below, self._tuples = None, set()

        def record_input(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._below = args[0]

        def record_type(module: nn.Module, args: Any, output: Any, layer: int) -> None:
            if isinstance(output, tuple):
                self._tuples.add(layer)

        blocks = [block_of(self.base, layer, self._spec) for layer in range(self.layer + 1)]
        with ExitStack() as hooks:
            hooks.callback(blocks[-1].register_forward_pre_hook(record_input).remove)
            for layer, block in enumerate(blocks[:-1]):
                hooks.callback(block.register_forward_hook(partial(record_type, layer=layer)).remove)
            logits: Tensor = self.base(input_ids, attention_mask=attention_mask, use_cache=False).logits
        return logits

    @contextmanager
    def skipped(self) -> Iterator[None]:
        """Start the model's forward pass inside at `layer`, for the tokens of the last call of `base_logits`."""
        assert self._below is not None
        with from_block(self.model, self._spec, ActivationCache(tuples=self._tuples), self._below):
            yield
        self._below = None


def _is_shared(module: nn.Module, other: nn.Module) -> bool:
    """True if both modules have the same parameters, frozen and in the same memory."""
    parameters, others = dict(module.named_parameters()), dict(other.named_parameters())
    return parameters.keys() == others.keys() and all(
        not p.requires_grad and p.data_ptr() == others[name].data_ptr() for name, p in parameters.items()
    )
