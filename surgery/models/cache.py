"""Copy and measure the caches of a forward pass."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from surgery.models.meters import FusedAttention, Meter
from surgery.models.runtime import evaluating


def snapshot(cache: Cache) -> Cache:
    """A copy with the current lengths, keys and values. It shares the states with `cache`."""
    saved = copy.copy(cache)
    saved.layers = [copy.copy(layer) for layer in cache.layers]
    return saved


def branched(cache: Cache, rows: Tensor, first: int = 0, shared: Collection[int] = ()) -> Cache:
    """A copy of the cache with these rows.

    Args:
        first: first layer that will run. The caches of lower layers are not copied.
        shared: layers whose SSM states are not copied, because nothing writes them.
    """
    branch = snapshot(cache)
    for index, layer in enumerate(branch.layers[first:], first):
        for name, place, value in _tensors(cache.layers[index], index in shared):
            taken = value.index_select(0, rows.to(value.device))
            setattr(layer, name, taken if place is None else {**getattr(layer, name), place: taken})
    return branch


def copied_bytes(cache: Cache, shared: Collection[int] = ()) -> int:
    """Bytes that `branched` copies for one variant of every row."""
    tensors = (_tensors(layer, index in shared) for index, layer in enumerate(cache.layers))
    return sum(value.nbytes for layer in tensors for _, _, value in layer)


def _tensors(layer: Any, shared: bool) -> Iterator[tuple[str, int | None, Tensor]]:
    """Iterate over the tensors of a layer of a cache: attribute, index in it, tensor. State 0 is that of the SSM."""
    for name, value in vars(layer).items():
        if isinstance(value, Tensor) and value.ndim > 1:  # keys and values
            yield name, None, value
        elif isinstance(value, dict):  # states by index
            yield from ((name, k, v) for k, v in value.items() if isinstance(v, Tensor) and not (shared and k == 0))


def cache_of_one_token(model: PreTrainedModel) -> tuple[list[Tensor], list[Tensor]]:
    """Run a model, possibly on the meta device, on one token. Returns the states, and the keys and values."""
    with torch.no_grad(), evaluating(model), FusedAttention(), Meter():
        ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        return cache_tensors(model(ids, use_cache=True).cache)


def cache_tensors(cache: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the state tensors, and the key and value tensors, of a transformers cache."""
    tensors = [(place, value) for layer in cache.layers for _, place, value in _tensors(layer, False)]
    return [x for place, x in tensors if place is not None], [x for place, x in tensors if place is None]
