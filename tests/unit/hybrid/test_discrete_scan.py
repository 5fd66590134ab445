"""The chunked scan is the step, many times: values and states, wherever the tokens are cut."""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.hybrid.modeling_llamba import chunked_scan, scan_step
from tests.support.cases import each

B, H, P, N = 2, 4, 5, 3


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


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


@each("groups", [1, 2, 4])
@each("chunk", [1, 3, 8, 64])
@each("T", [1, 2, 8, 21])
def test_chunks_are_steps(T: int, chunk: int, groups: int) -> None:
    assert_same(chunked_scan(*inputs(T, groups), chunk), stepped(*inputs(T, groups)))


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
