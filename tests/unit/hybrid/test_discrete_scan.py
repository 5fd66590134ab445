"""The chunked scan is the step, many times: values, states and gradients, wherever the tokens are cut."""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.hybrid.modeling_llamba import chunked_scan, scan_step
from tests.support.cases import each

B, H, P, N = 2, 4, 5, 3
every_grouping = each("groups", [1, 2, 4])


def inputs(T: int, groups: int = 2, seed: int = 0) -> list[Tensor]:
    """x, key, query, log decay, state: fp64."""
    rng = torch.Generator().manual_seed(seed)
    shapes = [(B, T, H, P), (B, T, groups, N), (B, T, groups, N), (B, T, H), (B, H, P, N)]
    x, key, query, decay, state = (torch.randn(s, generator=rng, dtype=torch.double) for s in shapes)
    return [x, key, query, -decay.abs(), state]


def stepped(x: Tensor, key: Tensor, query: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same, a token at a time."""
    out = []
    for t in range(x.shape[1]):
        y, state = scan_step(x[:, t], key[:, t], query[:, t], decay[:, t], state)
        out.append(y)
    return torch.stack(out, 1), state


def looped(x: Tensor, key: Tensor, query: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same, from the formula, a token and a head at a time."""
    out, states = torch.zeros_like(x), state.clone()
    shared = H // key.shape[2]
    for b in range(B):
        for h in range(H):
            for t in range(x.shape[1]):
                states[b, h] = decay[b, t, h].exp() * states[b, h] + torch.outer(x[b, t, h], key[b, t, h // shared])
                out[b, t, h] = states[b, h] @ query[b, t, h // shared]
    return out, states


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


class TestValues:
    @every_grouping
    @each("chunk", [1, 3, 8, 64])
    @each("T", [1, 2, 8, 21])
    def test_chunks_are_steps(self, T: int, chunk: int, groups: int) -> None:
        expected = looped(*inputs(T, groups))
        assert_same(stepped(*inputs(T, groups)), expected)
        assert_same(chunked_scan(*inputs(T, groups), chunk), expected)

    @each("chunk", [4, 32])
    def test_gradients(self, chunk: int) -> None:
        found, expected = ([v.requires_grad_() for v in inputs(13)] for _ in range(2))
        for leaves, (y, state) in ((found, chunked_scan(*found, chunk)), (expected, stepped(*expected))):
            (y.sin().sum() + state.cos().sum()).backward()
            assert all(v.grad.abs().max() > 1e-3 for v in leaves)
        assert_same(tuple(v.grad for v in found), tuple(v.grad for v in expected))


class TestNumerics:
    def test_complete_forgetting_is_finite(self) -> None:
        """Its gradients too."""
        x, key, query, decay, state = inputs(21)
        decay[:, 5] = -1e4
        decay.requires_grad_()
        y, last = chunked_scan(x, key, query, decay, state, 8)
        (y.sum() + last.sum()).backward()
        assert y.isfinite().all() and last.isfinite().all() and decay.grad.isfinite().all()
        forgotten = chunked_scan(x[:, 5:], key[:, 5:], query[:, 5:], decay[:, 5:], torch.zeros_like(state), 8)
        assert_same((y[:, 5:], last), forgotten)

    def test_weak_decay_after_a_strong_one_keeps_its_digits(self) -> None:
        x, key, query, decay, state = inputs(32)
        decay = decay * 0.01
        decay[:, 3] = -3000.0
        exact, _ = stepped(x, key, query, decay, state)
        found, _ = chunked_scan(*(v.float() for v in (x, key, query, decay, state)), 32)
        torch.testing.assert_close(found.double(), exact, atol=2e-5, rtol=1e-5)
