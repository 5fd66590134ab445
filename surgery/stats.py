"""Intervals and tests. Owns: the formulas. Must never know: models, heads' meaning.

Wilson (1927) intervals for accuracies, exact McNemar for paired right/wrong answers, paired bootstrap for margins,
Holm (1979) for many heads at once. Shape legend: C columns (heads), N prompts.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from surgery.types import Interval

Z95 = 1.959963984540054


def wilson(successes: int, n: int, z: float = Z95) -> Interval:
    """The score interval of a proportion; never leaves [0, 1], and is not empty at 0 or n successes."""
    if n == 0:
        return Interval(0.0, 0.0, 1.0, 0)
    p, z2 = successes / n, z * z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return Interval(p, max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half)), n)


def bootstrap_mean(differences_CN: NDArray[np.float64], seed: int, resamples: int = 2000) -> list[Interval]:
    """95% percentile intervals of each row's mean; prompts are resampled, the same ones for every row."""
    C, N = differences_CN.shape
    rng = np.random.default_rng(seed)
    counts_RN = rng.multinomial(N, np.full(N, 1 / N), size=resamples)
    means_CR = differences_CN @ counts_RN.T / N
    low, high = np.percentile(means_CR, [2.5, 97.5], axis=1)
    centre = differences_CN.mean(1)
    return [Interval(float(centre[c]), float(low[c]), float(high[c]), N) for c in range(C)]


def mcnemar(before_N: NDArray[np.bool_], after_N: NDArray[np.bool_]) -> float:
    """Exact one-sided p-value that `after` is wrong more often where `before` is right than the other way round."""
    lost, won = int((before_N & ~after_N).sum()), int((~before_N & after_N).sum())
    n = lost + won
    tail = sum(math.comb(n, k) for k in range(lost, n + 1))
    return tail / 2**n


def holm(p_values: list[float], level: float = 0.05) -> list[bool]:
    """Which hypotheses fall with the family-wise error at `level`."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    rejected = [False] * len(p_values)
    for rank, index in enumerate(order):
        if p_values[index] > level / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected
