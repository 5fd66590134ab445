"""Divergences against the formulas as they are written: values, gradients, and what is never made."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.errors import RecipeError
from surgery.models.meters import Meter
from surgery.train import divergence as module
from surgery.train.divergence import Kind, TopK, divergence
from tests.support.oracles import naive_divergence

N, V = 7, 61
KINDS: tuple[Kind, ...] = get_args(Kind)
EVERY = pytest.mark.parametrize("kind", KINDS)


def logits(seed: int = 0, rows: int = N, width: int = V) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=rng, dtype=torch.float64) * 3


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows at a time: seven rows are four blocks, the last of one row."""
    monkeypatch.setattr(module, "_BLOCK_ON_CPU", 2 * V)


def naive_events(x_NV: Tensor, indices_NK: Tensor) -> Tensor:
    """(N,K+1) log-probabilities of K tokens and of any other, by adding the probabilities of the others."""
    p = x_NV.softmax(-1)
    named = p.gather(-1, indices_NK)
    rest = p.masked_fill(F.one_hot(indices_NK, x_NV.shape[-1]).sum(1).bool(), 0.0).sum(-1, keepdim=True)
    return torch.cat([named, rest], -1).log()


def value_and_gradient(loss: Tensor, student: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.arange(1, len(loss) + 1, dtype=loss.dtype)  # rows count differently: a swapped row shows
    (gradient,) = torch.autograd.grad((loss * weights).sum(), student)
    return loss.detach(), gradient


@EVERY
def test_it_is_the_naive_formula_and_so_is_its_gradient(kind: Kind) -> None:
    """Over all tokens, and over the likeliest ones and the rest. The teacher gets no gradient."""
    student, teacher = logits(0).requires_grad_(), logits(1).requires_grad_()
    top = TopK.of(teacher, 5)
    for temperature in (1.0, 2.5):
        for target in (teacher, top):
            found = value_and_gradient(divergence(student, target, kind, temperature), student)
            naive = [x if target is teacher else naive_events(x, top.indices) for x in (student, teacher.detach())]
            expected = value_and_gradient(naive_divergence(*naive, kind, temperature), student)
            for mine, other in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-10)
    divergence(student, teacher, kind).sum().backward()
    assert student.grad is not None and teacher.grad is None


@EVERY
def test_some_rows_alone(kind: Kind) -> None:
    student, teacher, rows = logits(0).requires_grad_(), logits(1), torch.tensor([1, 2, 6])
    for some_target, target in ((teacher, teacher), (TopK.of(teacher, 3, rows), TopK.of(teacher, 3))):
        some, every = divergence(student, some_target, kind, 2.0, rows), divergence(student, target, kind, 2.0)
        torch.testing.assert_close(some, every[rows])
        (gradient,) = torch.autograd.grad(some.sum(), student)
        assert (gradient.abs().sum(-1) > 0).nonzero()[:, 0].tolist() == rows.tolist()
        torch.testing.assert_close(gradient, torch.autograd.grad(every[rows].sum(), student)[0])
    none = rows[:0]
    for target in (teacher, TopK.of(teacher, 3, none)):
        loss = divergence(student, target, kind, 1.0, none)
        assert loss.shape == (0,)
        assert torch.equal(torch.autograd.grad(loss.sum(), student)[0], torch.zeros_like(student))


@EVERY
def test_bfloat16_logits(kind: Kind) -> None:
    student, teacher = (logits(seed).bfloat16() for seed in (0, 1))
    exact = student.double().requires_grad_()
    student.requires_grad_()
    for rounded, target in ((teacher, teacher.double()), (TopK.of(teacher, 3), TopK.of(teacher.double(), 3))):
        loss, gradient = value_and_gradient(divergence(student, rounded, kind), student)
        expected, slope = value_and_gradient(divergence(exact, target, kind), exact)
        assert loss.dtype == torch.float32 and gradient.dtype == torch.bfloat16
        torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradient.double(), slope, rtol=2**-8, atol=1e-5)
    halves = TopK(torch.full((1, 2), -0.69).bfloat16(), torch.tensor([[0, 1]]))
    assert float(halves.values.double().exp().sum()) > 1, "two tokens of a half each are more than one together"
    assert bool(divergence(logits(rows=1), halves, kind).isfinite().all())


def test_no_tensor_of_the_logits_size_but_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most bytes alive at once in a forward and backward pass beside the logits. The naive formula makes many."""
    monkeypatch.setattr(module, "_BLOCK_ON_CPU", 2 * 2048)
    block = 2 * 2048 * 4
    student, teacher = (logits(seed, 64, 2048).bfloat16() for seed in (0, 1))
    student.requires_grad_()

    def peak_of(kind: Kind, top_k: int | None) -> int:
        with Meter([student, teacher]) as meter:
            divergence(student, teacher if top_k is None else TopK.of(teacher, top_k), kind, 2.0).sum().backward()
        student.grad = None
        return meter.peak

    for kind in KINDS:
        for top_k in (None, 8):
            assert student.nbytes < peak_of(kind, top_k) < student.nbytes + 10 * block, (kind, top_k)
    with Meter([student, teacher]) as meter:
        naive_divergence(student.float(), teacher.float(), "forward", 2.0).sum().backward()
    assert meter.peak > 6 * student.nbytes


def test_the_likeliest_tokens_and_their_log_probabilities() -> None:
    x = logits()
    top, probabilities = TopK.of(x, 4, torch.tensor([5, 2])), x[[5, 2]].softmax(-1)
    torch.testing.assert_close(top.values.exp(), probabilities.sort(-1, descending=True).values[:, :4])
    torch.testing.assert_close(top.values.exp(), probabilities.gather(-1, top.indices))
    with pytest.raises(RecipeError, match="top_k"):
        TopK.of(x, V)
