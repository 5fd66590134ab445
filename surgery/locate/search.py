"""Successive elimination: heads that cannot be among the best are measured on few prompts. Owns: the rule, its risk.

After 32, 64, 128, ... prompts a head is dropped if it is worse than every one of the best k so far by a paired
one-sided t-test, at a level that all pairs of heads and all rounds share (Bonferroni). A head of the true best k is at
least as good as one of any k others, so it is dropped only if one of these tests rejects a true hypothesis: the chance
of missing any of them is at most `risk`, as far as means of margins are normal. Successive halving (Karnin et al. 2013)
and racing (Maron and Moore 1997) are its relatives: halving drops half of them whatever the data say, and has no risk
that could be stated beforehand.

Must never know: models. Shape legend: C heads, A arms (a head may enter by several columns), N prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t


def rounds(first: int, examples: int) -> list[int]:
    """Prompts measured at the end of each round: doubled, and all of them last."""
    counts = []
    while first < examples:
        counts.append(first)
        first *= 2
    return [*counts, examples]


def survivors(
    arms_ACN: Sequence[NDArray[np.float64]], alive: Sequence[int], keep: int, risk: float, num_rounds: int
) -> list[int]:
    """The heads of `alive` that may still be among the best `keep`.

    Args:
        arms_ACN: scores by prompt, the larger the better; a head counts by its best arm. NaN where dropped before.
        risk: of dropping one of the true best, over all rounds.
    """
    if len(alive) <= keep:
        return list(alive)
    scores_ACN = np.stack([arm[list(alive)] for arm in arms_ACN])
    scores_ACN = scores_ACN[:, :, ~np.isnan(scores_ACN).any((0, 1))]
    A, _, N = scores_ACN.shape
    means_AC = scores_ACN.mean(-1)
    best_C = means_AC.argmax(0)
    order = np.argsort(-means_AC.max(0), kind="stable")
    level = risk / (num_rounds * (A * arms_ACN[0].shape[0]) ** 2)
    limit = float(t.isf(level, N - 1))
    worse_AC = np.ones((A, scores_ACN.shape[1]), dtype=bool)
    for best in order[:keep]:
        lead_ACN = scores_ACN[best_C[best], best] - scores_ACN
        error_AC = lead_ACN.std(-1, ddof=1) / math.sqrt(N)
        worse_AC &= lead_ACN.mean(-1) > limit * error_AC + 1e-12
    kept = set(order[:keep].tolist()) | set(np.flatnonzero(~worse_AC.all(0)).tolist())
    return [head for place, head in enumerate(alive) if place in kept]
