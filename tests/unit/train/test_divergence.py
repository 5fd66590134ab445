"""Divergences against the formulas as they are written: values, gradients, and what is never made."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.errors import RecipeError
from surgery.models.meters import Meter
from surgery.train import divergence as module
from surgery.train.divergence import Kind, TopK, divergence, grouped
from tests.support.oracles import naive_divergence

N, V = 7, 61
KINDS: tuple[Kind, ...] = get_args(Kind)


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


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_naive_formula_and_so_is_its_gradient(kind: Kind, temperature: float) -> None:
    student, teacher = logits(0).requires_grad_(), logits(1)
    found = value_and_gradient(divergence(student, teacher, kind, temperature), student)
    expected = value_and_gradient(naive_divergence(student, teacher, kind, temperature), student)
    for mine, naive in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, naive, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("kind", KINDS)
def test_of_the_likeliest_tokens_it_is_the_naive_formula_over_k_and_the_rest(kind: Kind, temperature: float) -> None:
    student, teacher = logits(0).requires_grad_(), logits(1)
    top = TopK.of(teacher, 5)
    found = value_and_gradient(divergence(student, top, kind, temperature), student)
    events = [naive_events(x, top.indices) for x in (student, teacher)]
    expected = value_and_gradient(naive_divergence(events[0], events[1], kind, temperature), student)
    for mine, naive in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, naive, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_finite_differences(kind: Kind, top_k: int | None) -> None:
    student, teacher = logits(0, 3, 9).requires_grad_(), logits(1, 3, 9)
    target = teacher if top_k is None else TopK.of(teacher, top_k)
    assert torch.autograd.gradcheck(lambda s: divergence(s, target, kind, 1.7), student)


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_some_rows_alone(kind: Kind, top_k: int | None) -> None:
    student, teacher = logits(0).requires_grad_(), logits(1)
    rows = torch.tensor([1, 2, 6])
    target = teacher if top_k is None else TopK.of(teacher, top_k, rows)
    some = divergence(student, target, kind, 2.0, rows)
    every = divergence(student, teacher if top_k is None else TopK.of(teacher, top_k), kind, 2.0)
    torch.testing.assert_close(some, every[rows])
    (gradient,) = torch.autograd.grad(some.sum(), student)
    assert (gradient.abs().sum(-1) > 0).nonzero()[:, 0].tolist() == rows.tolist()
    torch.testing.assert_close(gradient, torch.autograd.grad(every[rows].sum(), student)[0])


@pytest.mark.parametrize("top_k", [None, 3])
def test_no_rows_are_no_terms_but_a_gradient(top_k: int | None) -> None:
    student, rows = logits().requires_grad_(), torch.empty(0, dtype=torch.long)
    target = logits(1) if top_k is None else TopK.of(logits(1), top_k, rows)
    loss = divergence(student, target, "forward", 1.0, rows)
    assert loss.shape == (0,)
    assert torch.equal(torch.autograd.grad(loss.sum(), student)[0], torch.zeros_like(student))


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_logits(kind: Kind, top_k: int | None) -> None:
    student, teacher = (logits(seed).bfloat16() for seed in (0, 1))
    student.requires_grad_()
    exact = student.detach().double().requires_grad_()
    targets = [x if top_k is None else TopK.of(x, top_k) for x in (teacher, teacher.double())]
    loss, gradient = value_and_gradient(divergence(student, targets[0], kind), student)
    expected, slope = value_and_gradient(divergence(exact, targets[1], kind), exact)
    assert loss.dtype == torch.float32 and gradient.dtype == torch.bfloat16
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient.double(), slope, rtol=2**-8, atol=1e-5)


def peak_of(compare: object, dtype: torch.dtype = torch.bfloat16) -> tuple[int, int]:
    """Most bytes alive at once in a forward and backward pass beside the logits; and bytes of the logits."""
    student, teacher = (logits(seed, 64, 2048).to(dtype) for seed in (0, 1))
    student.requires_grad_()
    with Meter([student, teacher]) as meter:
        compare(student, teacher).sum().backward()  # type: ignore[operator]
    return meter.peak, student.nbytes


@pytest.mark.parametrize("top_k", [None, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_of_the_logits_size_but_the_gradient(
    kind: Kind, top_k: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK_ON_CPU", 2 * 2048)
    block = 2 * 2048 * 4
    target = (lambda t: t) if top_k is None else (lambda t: TopK.of(t, top_k))
    peak, size = peak_of(lambda s, t: divergence(s, target(t), kind, 2.0))
    assert size < peak < size + 10 * block  # ten blocks are a third of the logits in fp32


def test_the_naive_formula_makes_many() -> None:
    peak, size = peak_of(lambda s, t: naive_divergence(s.float(), t.float(), "forward", 2.0))
    assert peak > 6 * size


@pytest.mark.parametrize("kind", KINDS)
def test_equal_predictions_are_no_distance_apart(kind: Kind) -> None:
    student, other = logits(0), logits(1)
    assert divergence(student + 5, student, kind, 2.0).abs().max() < 1e-12
    assert divergence(student, other, kind, 2.0).min() > 0.01


def test_the_three_are_related_as_their_names_say() -> None:
    a, b = logits(0), logits(1)
    torch.testing.assert_close(divergence(a, b, "forward"), divergence(b, a, "reverse"))
    halves = divergence(a, b, "jensen_shannon")
    torch.testing.assert_close(halves, divergence(b, a, "jensen_shannon"))
    assert halves.max() < math.log(2)


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_events_are_never_further_apart(kind: Kind) -> None:
    """Putting events together loses information; the more tokens are kept, the less."""
    student, teacher = logits(0), logits(1)
    found = [divergence(student, TopK.of(teacher, k), kind) for k in (1, 5, 30)]
    found.append(divergence(student, teacher, kind))
    for fewer, more in itertools.pairwise(found):
        assert (fewer <= more + 1e-9).all()


def test_the_square_of_the_temperature_keeps_gradients_of_one_size() -> None:
    """At a high temperature the gradient is that of half the squared difference of the centred logits, over V."""
    student, teacher = logits(0).requires_grad_(), logits(1)
    (gradient,) = torch.autograd.grad(divergence(student, teacher, "forward", 1e4).sum(), student)
    difference = student.detach() - teacher
    torch.testing.assert_close(gradient, (difference - difference.mean(-1, keepdim=True)) / V, rtol=1e-2, atol=1e-4)


def test_the_teacher_gets_no_gradient() -> None:
    student, teacher = logits(0).requires_grad_(), logits(1).requires_grad_()
    divergence(student, teacher, "reverse").sum().backward()
    assert student.grad is not None and teacher.grad is None


def test_the_likeliest_tokens_and_their_log_probabilities() -> None:
    x = logits()
    top = TopK.of(x, 4, torch.tensor([5, 2]))
    probabilities = x[[5, 2]].softmax(-1)
    torch.testing.assert_close(top.values.exp(), probabilities.sort(-1, descending=True).values[:, :4])
    torch.testing.assert_close(top.values.exp(), probabilities.gather(-1, top.indices))


def test_rounded_log_probabilities_leave_something_for_the_rest() -> None:
    """Two tokens of a half each are more than one together in bfloat16."""
    halves = TopK(torch.full((1, 2), -0.69).bfloat16(), torch.tensor([[0, 1]]))
    assert float(halves.values.double().exp().sum()) > 1
    assert bool(divergence(logits(rows=1), halves, "reverse").isfinite().all())


def test_as_many_tokens_as_there_are_is_refused() -> None:
    with pytest.raises(RecipeError, match="top_k"):
        TopK.of(logits(), V)


def test_grouped_logits_are_a_distribution_of_the_same_probabilities() -> None:
    x, indices = logits(), torch.tensor([[3, 8]] * N)
    torch.testing.assert_close(grouped(x, indices).log_softmax(-1), naive_events(x, indices))
