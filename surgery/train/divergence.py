"""Divergence between the next-token distributions of a student and a teacher.

Let p be the teacher's and q the student's distribution at temperature `tau` (softmax of logits / tau), and
m = (p + q) / 2:

    forward         tau^2 * sum p (log p - log q)           Hinton et al., arXiv 1503.02531
    reverse         tau^2 * sum q (log q - log p)           MiniLLM, arXiv 2306.08543
    jensen_shannon  tau^2 * (KL(p || m) + KL(q || m)) / 2   as in GKD, arXiv 2306.13649, with beta = 1/2

The factor tau^2 makes the size of gradients independent of the temperature (arXiv 1503.02531, section 2.1).

If only the teacher's k most likely tokens are known, both distributions are grouped into k + 1 events: these tokens,
and "any other token". The student's logit of the last event is the logsumexp of all its other logits. The teacher's
log-probability of it is log(1 - sum of the k probabilities). The temperature is applied after the grouping, since the
teacher's probability of other tokens at another temperature cannot be computed from k values.

Rows are processed in blocks, in fp32 or more, forward and backward. The only further tensor with the size of the logits
is the gradient, in their dtype.

Shape legend: N rows of the logits, M selected rows, V vocabulary, K most likely tokens of the teacher, C either V or
K + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from surgery.errors import RecipeError

Kind = Literal["forward", "reverse", "jensen_shannon"]

_LEAST = 1e-6  # smallest probability of "any other token", which rounding could make 0 or negative
_LOG_2 = 0.6931471805599453
_BLOCK_ON_CPU, _BLOCK = 2**19, 2**24  # numbers in a block of rows: fits a CPU's caches; occupies a GPU's cores


@dataclass(frozen=True)
class TopK:
    """The k most likely tokens of each row.

    Attributes:
        values: (M,K) log-probabilities in the distribution over the whole vocabulary, at temperature 1.
        indices: (M,K) token ids.
    """

    values: Tensor
    indices: Tensor

    def __len__(self) -> int:
        return self.indices.shape[0]

    def __getitem__(self, rows: slice) -> TopK:
        return TopK(self.values[rows], self.indices[rows])

    def to(self, device: torch.device | str) -> TopK:
        return TopK(self.values.to(device), self.indices.to(device))

    @classmethod
    @torch.no_grad()
    def of(cls, logits_NV: Tensor, k: int, rows_M: Tensor | None = None) -> TopK:
        """Select the k most likely tokens of some rows; of all by default.

        Raises:
            RecipeError: the vocabulary has k tokens or fewer.
        """
        if k >= logits_NV.shape[-1]:
            hint = f"The vocabulary has {logits_NV.shape[-1]} tokens. Remove top_k to compare all of them."
            raise RecipeError("train.distil.top_k", k, hint)
        all_values, all_indices = [], []
        for rows in _blocks(logits_NV, rows_M):
            x = _fp32(_select(logits_NV, rows))
            values, indices = x.topk(k, dim=-1)
            all_values.append(values - x.logsumexp(-1, keepdim=True))
            all_indices.append(indices)
        return cls(torch.cat(all_values), torch.cat(all_indices))

    def events(self) -> Tensor:
        """(M,K+1) log-probabilities of the k tokens and of any other token, in fp32 or more."""
        values = _fp32(self.values)
        rest = (1 - values.exp().sum(-1, keepdim=True)).clamp(min=_LEAST).log()
        return torch.cat([values, rest], dim=-1)


def divergence(
    student_NV: Tensor, teacher: Tensor | TopK, kind: Kind, temperature: float = 1.0, rows_M: Tensor | None = None
) -> Tensor:
    """Compute the divergence of each row, (M,) in fp32 or more. Only the student gets a gradient.

    Args:
        student_NV: logits of the student.
        teacher: (N,V) logits, or the most likely tokens of the M rows.
        kind: name of a formula of this module.
        temperature: both logits are divided by it.
        rows_M: indices of the rows to compare; all by default.
    """
    if isinstance(teacher, Tensor):
        return _Divergence.apply(student_NV, teacher.detach(), rows_M, kind, temperature)  # type: ignore[no-any-return]
    events_MC = grouped(student_NV, teacher.indices, rows_M)
    return _Divergence.apply(events_MC, teacher.events().detach(), None, kind, temperature)  # type: ignore[no-any-return]


def grouped(logits_NV: Tensor, indices_MK: Tensor, rows_M: Tensor | None = None) -> Tensor:
    """(M,K+1) logits of K tokens of each row and, last, of any other token (logsumexp of the rest). fp32 or more."""
    return _Grouped.apply(logits_NV, indices_MK.long(), rows_M)  # type: ignore[no-any-return]


def _fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _soft(x: Tensor, temperature: float) -> Tensor:
    return _fp32(x) if temperature == 1 else _fp32(x) / temperature


def _blocks(logits_NV: Tensor, rows_M: Tensor | None) -> Iterator[Any]:
    """Yield the indices of rows, one block at a time."""
    size = max(1, (_BLOCK_ON_CPU if logits_NV.device.type == "cpu" else _BLOCK) // logits_NV.shape[-1])
    if rows_M is not None:
        yield from rows_M.split(size)  # one empty block if there are no rows
    else:
        yield from (slice(i, i + size) for i in range(0, max(1, logits_NV.shape[0]), size))


def _select(x_NV: Tensor, rows: Any) -> Tensor:
    return x_NV[rows] if isinstance(rows, slice) else x_NV.index_select(0, rows)


def _put(x_NV: Tensor, rows: Any, values: Tensor) -> None:
    if isinstance(rows, slice):
        x_NV[rows] = values
    else:
        x_NV.index_copy_(0, rows, values.to(x_NV.dtype))


class _Divergence(torch.autograd.Function):
    """d/ds_j = q_j (g_j - sum_i q_i g_i) / tau with g = d/dq: -p/q, log(q/p), or log(q/m) / 2.

    The backward pass needs both logits, which are in memory anyway, and three numbers per row.
    """

    @staticmethod
    def forward(
        ctx: Any, student_NC: Tensor, teacher_NC: Tensor, rows_M: Tensor | None, kind: Kind, temperature: float
    ) -> Tensor:
        losses, statistics = [], []
        for rows in _blocks(student_NC, rows_M):
            s, t = _soft(_select(student_NC, rows), temperature), _soft(_select(teacher_NC, rows), temperature)
            norms = torch.stack([s.logsumexp(-1), t.logsumexp(-1)])
            loss, mean = _FORMULAS[kind](t - norms[1][:, None], s - norms[0][:, None])
            losses.append(loss * temperature**2)
            statistics.append(torch.cat([norms, mean[None]]))
        ctx.save_for_backward(student_NC, teacher_NC, torch.cat(statistics, 1), rows_M)
        ctx.kind, ctx.temperature = kind, temperature
        return torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_M: Tensor) -> Any:
        student_NC, teacher_NC, statistics, rows_M = ctx.saved_tensors
        gradient = torch.empty_like(student_NC) if rows_M is None else torch.zeros_like(student_NC)
        done = 0
        for rows in _blocks(student_NC, rows_M):
            s, t = (_soft(_select(x, rows), ctx.temperature) for x in (student_NC, teacher_NC))
            here = slice(done, done + len(s))
            norm_s, norm_t, mean = statistics[:, here, None]
            slope = _SLOPES[ctx.kind](t - norm_t, s - norm_s, mean)
            _put(gradient, rows, slope.mul_(upstream_M[here, None] * ctx.temperature))
            done = here.stop
        return gradient, None, None, None, None


def _forward(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Divergence of each row and mean of g under q, from log-probabilities."""
    loss = (p.exp() * (p - q)).sum(-1)
    return loss, torch.full_like(loss, -1.0)


def _reverse(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    loss = (q.exp() * (q - p)).sum(-1)
    return loss, loss


def _jensen_shannon(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    m = torch.logaddexp(p, q) - _LOG_2
    half = (q.exp() * (q - m)).sum(-1) / 2
    return (p.exp() * (p - m)).sum(-1) / 2 + half, half


_FORMULAS = {"forward": _forward, "reverse": _reverse, "jensen_shannon": _jensen_shannon}
_SLOPES = {
    "forward": lambda p, q, mean: q.exp() - p.exp(),
    "reverse": lambda p, q, mean: q.exp() * (q - p - mean),
    "jensen_shannon": lambda p, q, mean: q.exp() * ((q - torch.logaddexp(p, q) + _LOG_2) / 2 - mean),
}


class _Grouped(torch.autograd.Function):
    """See `grouped`. The gradient of "any other token" is distributed over these tokens by their probabilities."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, indices_MK: Tensor, rows_M: Tensor | None) -> Tensor:
        events, done = [], 0
        for rows in _blocks(logits_NV, rows_M):
            x = _select(logits_NV, rows)
            indices = indices_MK[done : done + len(x)]
            named = _fp32(x.gather(-1, indices))
            rest = _others(x, indices).logsumexp(-1, keepdim=True)
            events.append(torch.cat([named, rest], dim=-1))
            done += len(x)
        events_MC = torch.cat(events)
        ctx.save_for_backward(logits_NV, indices_MK, events_MC[:, -1:], rows_M)
        return events_MC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_MC: Tensor) -> Any:
        logits_NV, indices_MK, rest_M1, rows_M = ctx.saved_tensors
        gradient = torch.empty_like(logits_NV) if rows_M is None else torch.zeros_like(logits_NV)
        done = 0
        for rows in _blocks(logits_NV, rows_M):
            x = _select(logits_NV, rows)
            here = slice(done, done + len(x))
            indices, upstream = indices_MK[here], upstream_MC[here]
            share = (_others(x, indices) - rest_M1[here]).exp_().mul_(upstream[:, -1:])
            _put(gradient, rows, share.scatter_(-1, indices, upstream[:, :-1]))
            done = here.stop
        return gradient, None, None


def _others(x_MV: Tensor, indices_MK: Tensor) -> Tensor:
    """Logits in fp32 or more, with -inf at the indices."""
    return _fp32(x_MV).scatter(-1, indices_MK, -torch.inf)
