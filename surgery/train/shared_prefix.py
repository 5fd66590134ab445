"""What the frozen base and the model have in common. Owns: one copy of equal weights, one run of the layers below.

Must never know: losses, optimizers. Where new heads alone train, everything below the lowest of them is the base: its
weights need not lie in memory twice, and its output is the input of both. autograd keeps no graph there by itself.

Shape legend: B documents, T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.interventions.hooks import ActivationCache, from_block
from surgery.models.lookup import block_of, family_of


def share_weights(model: nn.Module, base: nn.Module) -> int:
    """Lets the base's parameters be the model's where those are frozen and equal; returns the bytes that this saves."""
    theirs, saved = dict(base.named_parameters()), 0
    for name, mine in model.named_parameters():
        other = theirs.get(name)
        if other is None or mine.requires_grad or other.data_ptr() == mine.data_ptr():
            continue
        if (other.shape, other.dtype, other.device) == (mine.shape, mine.dtype, mine.device) and torch.equal(
            other, mine
        ):
            other.data = mine.data
            saved += mine.nbytes
    return saved


class SharedPrefix:
    """The layers below the lowest that trains, run once for base and model.

    Attributes:
        layer: the first that is run twice.
    """

    def __init__(self, model: PreTrainedModel, base: PreTrainedModel, layer: int) -> None:
        self.model, self.base, self.layer = model, base, layer
        self._spec = family_of(model.config).mixers(model.config)[layer]
        self._below: Tensor | None = None
        self._tuples: set[str | int] = set()

    @classmethod
    def of(cls, model: PreTrainedModel, base: PreTrainedModel | None) -> SharedPrefix | None:
        """None where they have no layer in common: the weights of the two are to be one already, `share_weights`."""
        if base is None:
            return None
        mixers = family_of(model.config).mixers(model.config)
        theirs = family_of(base.config).mixers(base.config)
        if [spec.layer for spec in mixers] != list(range(len(mixers))) or len(theirs) != len(mixers):
            return None  # layers with several mixers, or with none
        common = 0
        for mine, other in zip(mixers, theirs, strict=True):
            if not _one(block_of(model, mine.layer, mine), block_of(base, other.layer, other)):
                break
            common += 1
        embeddings = _one(model.get_input_embeddings(), base.get_input_embeddings())
        return cls(model, base, common) if embeddings and 0 < common < len(mixers) else None

    @torch.no_grad()
    def base_logits(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B,T,V) of the base; what reaches `layer` is kept for the model."""
        self._below, self._tuples = None, set()
        handles = [block_of(self.base, self.layer, self._spec).register_forward_pre_hook(self._keep)]
        for layer in range(self.layer):
            block = block_of(self.base, layer, self._spec)
            handles.append(block.register_forward_hook(lambda _, __, out, k=layer: self._note(k, out)))
        try:
            logits: Tensor = self.base(input_ids, attention_mask=attention_mask, use_cache=False).logits
        finally:
            for handle in handles:
                handle.remove()
        return logits

    def _keep(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._below = args[0]

    def _note(self, layer: int, output: Any) -> None:
        if isinstance(output, tuple):
            self._tuples.add(layer)

    @contextmanager
    def skipped(self) -> Iterator[None]:
        """The model's forward that runs inside begins at `layer`, on the tokens of the last `base_logits`."""
        assert self._below is not None
        with from_block(self.model, self._spec, ActivationCache(tuples=self._tuples), self._below):
            yield
        self._below = None


def _one(mine: nn.Module, other: nn.Module) -> bool:
    """Whether both have the same parameters, frozen, and the same tensors in them."""
    pairs = dict(other.named_parameters())
    own = dict(mine.named_parameters())
    return own.keys() == pairs.keys() and all(
        not p.requires_grad and p.data_ptr() == pairs[name].data_ptr() for name, p in own.items()
    )
