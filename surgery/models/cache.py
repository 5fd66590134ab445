"""Copy and measure the caches of a forward pass."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from surgery.models.lookup import family_of
from surgery.models.meters import FusedAttention, Meter


def expand_cache(cache: Cache, variants: int, first: int = 0) -> Cache:
    """Copy a cache for several variants of every row.

    Args:
        cache: cache of B rows.
        variants: number of variants, W.
        first: first layer that will run. The caches of lower layers are not copied.

    Returns:
        A cache of W*B rows, variant-major.
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


def cache_bytes(model: PreTrainedModel, tokens: int = 4) -> CacheBytes:
    """Measure the cache of a model on the meta device, by a forward pass of `tokens` tokens."""
    model.eval()
    with torch.no_grad(), FusedAttention(), Meter():
        ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
        output = model(ids, use_cache=True)
    cache = output[family_of(model.config).cache_argument]
    states, keys_values = cache_tensors(cache)
    return CacheBytes(sum(t.nbytes for t in states), sum(t.nbytes for t in keys_values) // tokens)


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
