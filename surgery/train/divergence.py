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

Rows are processed in blocks, in fp32 or more, and the backward pass computes each block again. The only further tensor
with the size of the logits is the gradient, in their dtype.

Shape legend: N rows of the logits, M selected rows, b rows of a block, V vocabulary, K most likely tokens of a teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
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
        for rows, _ in _blocks(logits_NV, rows_M):
            x = _fp32(_select(logits_NV, rows))
            values, indices = x.topk(k, dim=-1)
            all_values.append(values - x.logsumexp(-1, keepdim=True))
            all_indices.append(indices)
        return cls(torch.cat(all_values), torch.cat(all_indices))


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

    def formula(x_bV: Tensor, rows: Any, here: slice, target: Tensor, indices_MK: Tensor | None = None) -> Tensor:
        if indices_MK is None:
            p, q = _fp32(_select(target, rows)), x_bV
        else:  # the K tokens, and any other token
            named, indices = _fp32(target[here]), indices_MK[here]
            other = (1 - named.exp().sum(-1, keepdim=True)).clamp(min=_LEAST).log()
            others = x_bV.scatter(-1, indices, -torch.inf).logsumexp(-1, keepdim=True)
            p, q = torch.cat([named, other], -1), torch.cat([x_bV.gather(-1, indices), others], -1)
        p = (p / temperature).log_softmax(-1)
        q = (q / temperature).log_softmax(-1)
        return _FORMULAS[kind](p, q) * temperature**2

    given = (teacher,) if isinstance(teacher, Tensor) else (teacher.values, teacher.indices.long())
    return _OfRows.apply(formula, student_NV, rows_M, *given)  # type: ignore[no-any-return]


def cross_entropy(logits_NV: Tensor, targets_M: Tensor, rows_M: Tensor | None = None) -> Tensor:
    """Compute -log p of one token in each row, (M,) in fp32 or more.

    Args:
        rows_M: indices of the rows; all by default.
    """

    def formula(x_bV: Tensor, rows: Any, here: slice, targets_M: Tensor) -> Tensor:
        return F.cross_entropy(x_bV, targets_M[here], reduction="none")

    return _OfRows.apply(formula, logits_NV, rows_M, targets_M)  # type: ignore[no-any-return]


def _forward(p: Tensor, q: Tensor) -> Tensor:
    """Divergence of each row from log-probabilities, as of the two below."""
    return (p.exp() * (p - q)).sum(-1)


def _reverse(p: Tensor, q: Tensor) -> Tensor:
    return (q.exp() * (q - p)).sum(-1)


def _jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    m = torch.logaddexp(p, q) - _LOG_2
    return (_forward(p, m) + _forward(q, m)) / 2


_FORMULAS = {"forward": _forward, "reverse": _reverse, "jensen_shannon": _jensen_shannon}


def _fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _blocks(logits_NV: Tensor, rows_M: Tensor | None) -> Iterator[tuple[Any, slice]]:
    """Yield the indices of rows, one block at a time, and their places among all selected rows."""
    size = max(1, (_BLOCK_ON_CPU if logits_NV.device.type == "cpu" else _BLOCK) // logits_NV.shape[-1])
    count = len(logits_NV) if rows_M is None else len(rows_M)
    for start in range(0, max(1, count), size):  # one empty block if there are no rows
        here = slice(start, min(start + size, count))
        yield here if rows_M is None else rows_M[here], here


def _select(x_NV: Tensor, rows: Any) -> Tensor:
    return x_NV[rows] if isinstance(rows, slice) else x_NV.index_select(0, rows)


class _OfRows(torch.autograd.Function):
    """A loss of each row of the logits, (M,).

    `formula` is called for each block with its logits in fp32 or more, the indices of its rows among the N, their
    places among the M, and `given`, which gets no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, formula: Callable[..., Tensor], x_NV: Tensor, rows_M: Tensor | None, *given: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x_NV, rows_M, *given)
        ctx.formula = formula
        return torch.cat(
            [formula(_fp32(_select(x_NV, rows)), rows, here, *given) for rows, here in _blocks(x_NV, rows_M)]
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_M: Tensor) -> Any:
        x_NV, rows_M, *given = ctx.saved_tensors
        gradient = torch.empty_like(x_NV) if rows_M is None else torch.zeros_like(x_NV)
        for rows, here in _blocks(x_NV, rows_M):
            x = _fp32(_select(x_NV, rows)).requires_grad_()
            with torch.enable_grad():
                loss = ctx.formula(x, rows, here, *given)
            gradient[rows] = torch.autograd.grad(loss, x, upstream_M[here])[0].to(x_NV.dtype)
        return None, gradient, None, *(None for _ in given)
