"""Copy and measure the caches of a forward pass."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from surgery.models.meters import FusedAttention, Meter


def expand_cache(cache: Cache, variants: int, first: int = 0, shared: Collection[int] = ()) -> Cache:
    """Copy a cache for several variants of every row.

    Args:
        cache: cache of B rows.
        variants: number of variants, W.
        first: first layer that will run. The caches of lower layers are not copied.
        shared: layers whose SSM states are not copied, because no variant writes them.

    Returns:
        A cache of W*B rows, variant-major.
    """
    expanded = copy.copy(cache)
    expanded.layers = []
    for index, layer in enumerate(cache.layers):
        new = copy.copy(layer)
        for name, place, value in _tensors(layer, index in shared) if index >= first else ():
            if place is None:
                setattr(new, name, _repeat(value, variants))
            else:
                setattr(new, name, {**getattr(new, name), place: _repeat(value, variants)})
        expanded.layers.append(new)
    return expanded


def copied_bytes(cache: Cache, shared: Collection[int] = ()) -> int:
    """Bytes that `expand_cache` copies for one variant of every row."""
    tensors = (_tensors(layer, index in shared) for index, layer in enumerate(cache.layers))
    return sum(value.nbytes for layer in tensors for _, _, value in layer)


def _tensors(layer: Any, shared: bool) -> Iterator[tuple[str, int | None, Tensor]]:
    """Iterate over the tensors of a layer of a cache: attribute, index in it, tensor. State 0 is that of the SSM."""
    for name, value in vars(layer).items():
        if isinstance(value, Tensor) and value.ndim > 1:  # keys and values
            yield name, None, value
        elif isinstance(value, dict):  # states by index
            yield from ((name, k, v) for k, v in value.items() if isinstance(v, Tensor) and not (shared and k == 0))


def _repeat(x: Tensor, variants: int) -> Tensor:
    return x.repeat(variants, *([1] * (x.ndim - 1)))


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of the cache of one sequence, in the model's own dtypes.

    Attributes:
        state: bytes of convolution and recurrent states, for any length.
        per_token: bytes of keys and values per token.
    """

    state: int
    per_token: int

    def at(self, tokens: int) -> int:
        """Return the bytes after `tokens` tokens."""
        return self.state + self.per_token * tokens


def cache_bytes(model: PreTrainedModel) -> CacheBytes:
    """Measure the cache of a model on the meta device, by a forward pass."""
    model.eval()
    with torch.no_grad(), FusedAttention(), Meter():
        ids = torch.zeros(1, 4, dtype=torch.long, device="meta")
        cache = model(ids, use_cache=True).cache
    states, keys_values = cache_tensors(cache)
    return CacheBytes(sum(t.nbytes for t in states), sum(t.nbytes for t in keys_values) // ids.numel())


def cache_tensors(cache: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the state tensors, and the key and value tensors, of a transformers cache."""
    states: list[Tensor] = []
    keys_values: list[Tensor] = []
    for layer in cache.layers:
        for name, value in vars(layer).items():
            if name in ("keys", "values"):
                keys_values += [value] if value is not None else []
            elif name in ("conv_states", "recurrent_states"):
                states += [t for t in value.values() if t is not None]
    return states, keys_values
