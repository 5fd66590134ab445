"""Score the shape of attention rows, given as arrays (docs/LOCATE.md).

A row holds shares: the weight of every past token in what one token reads. They sum to 1. Gather and Aggregate heads
are defined in arXiv 2504.18574.

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
    """Score how strongly the query reads the gold segment compared with the other segments.

    The score is `(m - 1/K) / (1 - 1/K)`, with m the gold segment's fraction of the share of all K segments. It is 1 if
    only the gold segment is read, and 0 if all segments are read equally or none is read.

    Args:
        row: (...,T) rows of the query.
        segments: spans in tokens.
        gold: index of the gold segment.

    Returns:
        (...) one score for each row.

    Raises:
        ProbeError: fewer than two segments.
    """
    K = len(segments)
    if K < 2:
        raise ProbeError("segments", K, "Pass at least two segments.")
    share_K = np.stack([row[..., start:stop].sum(-1) for start, stop in segments], axis=-1)
    total = share_K.sum(-1)
    part = np.divide(share_K[..., gold], total, out=np.full_like(total, 1 / K), where=total > 0)
    return np.asarray((part - 1 / K) / (1 - 1 / K))


def gather_score(ends: Shares, constant: Shares, segments: Sequence[Span]) -> Shares:
    """Score how strongly the last token of each segment reads its own segment, without the effect of the decay.

    Args:
        ends: (...,K,T) rows of the segments' last tokens.
        constant: the same rows computed with C.B held constant. They contain the decay alone, which also keeps a row on
            its own segment, and are subtracted.

    Returns:
        (...) the mean over segments.
    """

    def on_own_segment(rows: Shares) -> Shares:
        return np.stack([rows[..., k, start:stop].sum(-1) for k, (start, stop) in enumerate(segments)], axis=-1)

    return np.asarray((on_own_segment(ends) - on_own_segment(constant)).mean(-1))


def effective_tokens(row: Shares) -> Shares:
    """(...) number of tokens over which each row (...,T) is spread, 1 to T: exp of its entropy."""
    logs = np.log(np.where(row > 0, row, 1.0))
    return np.asarray(np.exp(-(row * logs).sum(-1)))


def entropy(row: Shares) -> Shares:
    """(...) entropy of rows (...,T), divided by that of a uniform row over T tokens: 0 to 1."""
    T = row.shape[-1]
    return np.asarray(np.log(effective_tokens(row)) / np.log(T)) if T > 1 else np.zeros(row.shape[:-1])


def sharpness(row: Shares) -> Shares:
    """(...) largest difference between neighbouring tokens of rows (...,T), 0 to 1.

    A decay changes smoothly along the prompt. Reading one token but not the next needs a sharp transition.
    """
    return np.asarray(np.abs(np.diff(row, axis=-1)).max(-1, initial=0.0))
