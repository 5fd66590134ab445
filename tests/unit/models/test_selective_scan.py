"""Mamba-1's scan and its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from surgery.models import selective_scan as module
from surgery.models.meters import Meter
from surgery.models.selective_scan import selective_scan


def scan_inputs(tokens: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x, dt, A, B, C of 2 documents, inner width 3 and state 4, with decays from almost none to almost total."""
    drawn = torch.Generator().manual_seed(0)
    sizes = (2, 3, tokens), (2, 3, tokens), (3, 4), (2, 4, tokens), (2, 4, tokens)
    x, dt, A, B, C = (torch.randn(size, generator=drawn, dtype=torch.float64) for size in sizes)
    return [v.to(dtype).requires_grad_() for v in (x, dt, -(3 * A).exp(), B, C)]


@pytest.fixture(params=[1, 5, 100])
def part(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Number of tokens in a part: of 7 tokens one each, parts with a rest, and all."""
    monkeypatch.setattr(module, "_PART", request.param * 24)
    return int(request.param)


def test_the_recurrence(part: int) -> None:
    x, dt, A, B, C = scan_inputs(7)
    D, z, bias = torch.randn(3).double(), torch.randn(2, 3, 7).double(), torch.randn(3).double()
    got, last = selective_scan(x, dt, A, B, C, D, z, bias, delta_softplus=True, return_last_state=True)
    dt, state = nn.functional.softplus(dt + bias[:, None]), torch.zeros(2, 3, 4, dtype=torch.float64)
    for t in range(7):
        step = dt[..., t, None]
        state = (step * A).exp() * state + step * x[..., t, None] * B[:, None, :, t]
        want = ((state * C[:, None, :, t]).sum(-1) + D * x[..., t]) * nn.functional.silu(z[..., t])
        torch.testing.assert_close(got[..., t], want)
    torch.testing.assert_close(last, state)


def test_the_gradient(part: int) -> None:
    """By finite differences, of the output and of the last state."""
    assert torch.autograd.gradcheck(
        lambda *given: selective_scan(*given, delta_softplus=True, return_last_state=True), scan_inputs(7)
    )


def test_a_frozen_decay_gets_no_gradient_and_the_others_keep_theirs(part: int) -> None:
    given, frozen = scan_inputs(7), scan_inputs(7)
    frozen[2].requires_grad_(False)
    for inputs in (given, frozen):
        y = selective_scan(*inputs, delta_softplus=True)
        assert isinstance(y, Tensor)
        y.square().sum().backward()
    assert frozen[2].grad is None
    for index in (0, 1, 3, 4):
        torch.testing.assert_close(frozen[index].grad, given[index].grad, atol=0, rtol=0)


def test_states_of_all_tokens_never_exist_at_once() -> None:
    """One (B,T,I,N) tensor has 64 MiB here."""
    sizes = (1, 512, 256), (1, 512, 256), (512, 128), (1, 128, 256), (1, 128, 256)
    given = [torch.empty(size, device="meta", requires_grad=True) for size in sizes]
    with Meter() as meter:
        y = selective_scan(*given)
        assert isinstance(y, Tensor)
        y.sum().backward()
    assert meter.peak < 48 * 2**20
