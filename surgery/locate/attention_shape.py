"""Scores of the shape of attention rows, on arrays. docs/LOCATE.md.

A row holds shares: how much one token reads of each token of its past, summing to 1. Gather and Aggregate are those of
arXiv 2504.18574.

Shape legend: T tokens of the prompt, K segments of it; `...` are leading dimensions of the caller.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from surgery.errors import ProbeError

Shares = NDArray[np.float64]
Span = tuple[int, int]  # [start, stop) in tokens


def aggregate_score(row: Shares, segments: Sequence[Span], gold: int) -> Shares:
    """Score how much of what the query reads of the segments is read of the gold one.

    `(m - 1/K) / (1 - 1/K)`, m being the gold segment's part of all K segments' share: 1 for a perfect reader, 0 where
    every segment counts alike or none is read at all.

    Args:
        row: (...,T) rows of the query.
        segments: spans in tokens.
        gold: index of the gold segment.

    Returns:
        (...)

    Raises:
        ProbeError: fewer than two segments.
    """
    K = len(segments)
    if K < 2:
        raise ProbeError("segments", K, "Give at least two: with fewer there is no choice.")
    share_K = np.stack([row[..., start:stop].sum(-1) for start, stop in segments], axis=-1)
    total = share_K.sum(-1)
    part = np.divide(share_K[..., gold], total, out=np.full_like(total, 1 / K), where=total > 0)
    return np.asarray((part - 1 / K) / (1 - 1 / K))


def gather_score(ends: Shares, constant: Shares, segments: Sequence[Span]) -> Shares:
    """Score how much of the segments' last tokens is on their own segment, beyond the decay.

    Args:
        ends: (...,K,T) rows of the segments' last tokens.
        constant: the same rows with C.B held constant. A fast decay alone keeps a row on its segment: that is deducted.

    Returns:
        (...) the mean over segments.
    """

    def on_own_segment(rows: Shares) -> Shares:
        return np.stack([rows[..., k, start:stop].sum(-1) for k, (start, stop) in enumerate(segments)], axis=-1)

    return np.asarray((on_own_segment(ends) - on_own_segment(constant)).mean(-1))


def effective_tokens(row: Shares) -> Shares:
    """(...) exp of the entropy of rows (...,T): the number of tokens over which a row is spread, 1 to T."""
    logs = np.log(np.where(row > 0, row, 1.0))
    return np.asarray(np.exp(-(row * logs).sum(-1)))


def entropy(row: Shares) -> Shares:
    """(...) the entropy of rows (...,T) over that of a uniform one, 0 to 1. T tokens can be read."""
    T = row.shape[-1]
    return np.asarray(np.log(effective_tokens(row)) / np.log(T)) if T > 1 else np.zeros(row.shape[:-1])


def sharpness(row: Shares) -> Shares:
    """(...) the largest step between neighbouring tokens of rows (...,T), 0 to 1.

    A decay is smooth along the prompt; reading one token and not the next takes a sharp transition.
    """
    return np.asarray(np.abs(np.diff(row, axis=-1)).max(-1, initial=0.0))
