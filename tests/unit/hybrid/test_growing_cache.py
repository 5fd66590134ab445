"""The buffer of keys and values: what transformers' cache holds, without a copy of it at every token."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer

from surgery.hybrid.modeling_hybrid import GrowingHybridLayer, GrowingLayer, let_grow
from tests.support.battery import trained
from tests.support.cases import each
from tests.support.pico import SPLICED_FAMILIES, tokens

PLAIN = {GrowingLayer: DynamicLayer, GrowingHybridLayer: LinearAttentionAndFullAttentionLayer}
every_kind = each("kind", list(PLAIN))
every_shape = each("shape", [(1, (8, 16)), (3, (8, 8)), (2, (16, 8))])


def token(number: int, heads: int, widths: tuple[int, int], rows: int = 2, count: int = 1) -> tuple[Tensor, Tensor]:
    """Key and value as a branch makes them: parts of one projection, [query | key | value] of all heads."""
    key, value = widths
    made = torch.randn(rows, count, heads * (2 * key + value), generator=torch.Generator().manual_seed(number))
    _, *parts = made.split([heads * key, heads * key, heads * value], dim=-1)
    first, second = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
    return first, second


def both(kind: type[Any]) -> tuple[Any, Any]:
    return kind(), PLAIN[kind]()


def assert_equal(grown: Any, plain: Any) -> None:
    assert torch.equal(grown.keys, plain.keys) and torch.equal(grown.values, plain.values)
    assert grown.get_seq_length() == plain.get_seq_length()


@every_kind
@every_shape
def test_holds_what_transformers_layer_holds(kind: type[Any], shape: tuple) -> None:
    """Also where keys and values are tensors of their own, and where several tokens come at once."""
    grown, plain = both(kind)
    for number in range(120):
        key, value = token(number, *shape, count=7 if number in (0, 60) else 1)
        if number % 3 == 0:
            key, value = key.clone(), value.clone()
        for mine, theirs in zip(grown.update(key, value), plain.update(key, value), strict=True):
            assert torch.equal(mine, theirs)
    assert_equal(grown, plain)


@every_shape
def test_few_tokens_move_the_others(shape: tuple) -> None:
    """1,000 tokens are moved at most a dozen times."""
    layer, places = GrowingLayer(), []
    for number in range(1000):
        layer.update(*token(number, *shape, count=50 if number == 0 else 1))
        places.append(layer.keys.data_ptr())
    moves = sum(a != b for a, b in itertools.pairwise(places))
    assert 2 <= moves <= 12


def replace(layer: Any) -> None:
    layer.keys, layer.values = layer.keys + 1, layer.values[:]


# Each changes the layer, or gives another one.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "repeated": lambda layer: layer.batch_repeat_interleave(2),
    "selected": lambda layer: layer.batch_select_indices(torch.tensor([1, 1])),
    "reordered": lambda layer: DynamicLayer.reorder_cache(layer, torch.tensor([1, 0])),
    "cropped": lambda layer: DynamicLayer.crop(layer, -3),
    "replaced": replace,
    "offloaded": lambda layer: (layer.offload(), layer.prefetch())[1],
    "emptied": lambda layer: layer.reset(),
    "copied": copy.copy,
    "copied deeply": copy.deepcopy,
}


@every_kind
@each("change", CHANGES)
def test_continues_after_a_change(kind: type[Any], change: Callable[[Any], Any]) -> None:
    """The changed layer goes on as transformers' does, and what it was copied from stays as it was and goes on too."""
    grown, plain = both(kind)
    for number in range(20):
        grown.update(*token(number, 3, (8, 8)))
        plain.update(*token(number, 3, (8, 8)))
    earlier, shown = [(grown, plain)], grown.keys
    kept = shown.clone()
    grown, plain = change(grown) or grown, change(plain) or plain
    for number in range(20, 100):
        for mine, theirs in ((grown, plain), *(earlier if grown is not earlier[0][0] else ())):
            rows = mine.keys.shape[0] if mine.get_seq_length() else 2
            different = number if mine is grown else number + 1000
            for layer in (mine, theirs):
                layer.update(*token(different, 3, (8, 8), rows))
            assert_equal(mine, theirs)
    assert torch.equal(shown, kept)


def test_gradients_pass_through_the_cache() -> None:
    """A token that needs gradients is concatenated, and so are those after it; later ones without them are not."""
    grads = []
    for layer in both(GrowingLayer):
        layer.update(*token(0, 1, (8, 8)))
        layer.update(*token(1, 1, (8, 8)))
        key, value = (x.detach().requires_grad_() for x in token(2, 1, (8, 8)))
        layer.update(key, value)
        keys, values = layer.update(*token(3, 1, (8, 8)))
        (keys.pow(2).sum() + values.pow(3).sum()).backward()
        grads.append((key.grad, value.grad))
        with torch.no_grad():
            assert not layer.update(*token(4, 1, (8, 8)))[0].requires_grad
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_other_modes_and_dtypes() -> None:
    """A buffer of inference mode is not written outside it, and a token of another dtype is not rounded."""
    grown, plain = both(GrowingLayer)
    for number, mode in enumerate([torch.inference_mode] * 3 + [torch.no_grad] * 3 + [torch.inference_mode] * 2):
        key, value = token(number, 1, (8, 8))
        with mode():
            assert torch.equal(grown.update(key, value)[0], plain.update(key, value)[0])
    half, single = (x.bfloat16() for x in token(8, 1, (8, 8))), token(9, 1, (8, 8))
    grown, plain = both(GrowingLayer)
    half = list(half)
    for layer in (grown, plain):
        layer.update(*half)
        layer.update(*half)
        layer.update(*single)
    assert_equal(grown, plain)
    assert grown.keys.dtype == torch.float32


@each("name", SPLICED_FAMILIES)
def test_layers_with_keys_grow(name: str) -> None:
    """In a cache that the model makes, and in one that it is given; of a fixed size they stay."""
    model = trained(name)
    made = model(tokens(), use_cache=True).cache
    given = DynamicCache(config=model.config)
    model(tokens(), use_cache=True, cache=given)
    for cache in (made, given):
        kinds = {type(layer) for layer in cache.layers}
        assert kinds.isdisjoint(PLAIN.values()) and GrowingHybridLayer in kinds
    fixed = StaticCache(config=model.config, max_cache_len=30)
    before = [type(layer) for layer in fixed.layers]
    let_grow(fixed)
    assert [type(layer) for layer in fixed.layers] == before
