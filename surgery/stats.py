"""Confidence intervals and tests for paired results.

Wilson intervals (Wilson, 1927) for accuracies, exact McNemar tests for paired right/wrong answers, the paired bootstrap
for margins, and Holm's correction (Holm, 1979) for several tests. Shape legend: C columns, N prompts, R resamples.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from surgery.types import Interval


def wilson(successes: int, n: int) -> Interval:
    """95% Wilson score interval of a proportion; (0, 1) if `n` is 0."""
    if n == 0:
        return Interval(0.0, 0.0, 1.0, 0)
    from scipy.stats import binomtest  # slow to import

    limits = binomtest(successes, n).proportion_ci(0.95, method="wilson")
    return Interval(successes / n, float(limits.low), float(limits.high), n)


@lru_cache(maxsize=1)
def resampled_counts(prompts: int, seed: int, resamples: int = 2000) -> NDArray[np.float64]:
    """(R,N) how often each resample draws each prompt. Drawing takes most of the time of an interval."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples).astype(np.float64)


def bootstrap_mean(values_CN: NDArray[np.float64], seed: int, resamples: int = 2000) -> list[Interval]:
    """95% percentile bootstrap intervals of the mean of each column. All columns share the resampled prompts.

    Args:
        values_CN: one row for each column, such as differences of margins.
    """
    C, N = values_CN.shape
    means_CR = values_CN @ resampled_counts(N, seed, resamples).T / N
    low, high = np.percentile(means_CR, [2.5, 97.5], axis=1)
    mean = values_CN.mean(1)
    return [Interval(float(mean[c]), float(low[c]), float(high[c]), N) for c in range(C)]


def mcnemar(before_N: NDArray[np.bool_], after_N: NDArray[np.bool_]) -> float:
    """Exact one-sided McNemar test: p-value of the hypothesis that `after` is right less often than `before`.

    The tail is summed in integers and rounded once. `scipy.stats.binomtest` differs by up to 8e-16 at 105 discordant
    prompts, and returns 0 below 1e-290.
    """
    lost, won = int((before_N & ~after_N).sum()), int((~before_N & after_N).sum())
    n = lost + won
    term = tail = math.comb(n, lost)
    for k in range(lost, n):
        term = term * (n - k) // (k + 1)
        tail += term
    return tail / 2**n


def means_are_positive(values_CN: NDArray[np.float64]) -> NDArray[np.float64]:
    """One-sided t-tests: p-value of each row's hypothesis that its mean is 0 or less. NaN for a single value.

    Equal values are certain.
    """
    from scipy.stats import t  # slow to import

    more = values_CN.shape[1] - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        p_values = t.sf(values_CN.mean(1) / (values_CN.std(1) / more**0.5), more)
    return np.where((more > 0) & (np.ptp(values_CN, axis=1) == 0), values_CN[:, 0] <= 0, p_values)


def at_least(successes: int, n: int, p: float) -> float:
    """Probability of so many successes or more in `n` independent trials that succeed with probability `p`."""
    from scipy.special import betainc

    return float(betainc(successes, n - successes + 1, p)) if successes else 1.0


def holm(p_values: list[float], level: float = 0.05) -> list[bool]:
    """True for each hypothesis that is rejected with the family-wise error rate at `level`."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    rejected = [False] * len(p_values)
    for rank, index in enumerate(order):
        if p_values[index] > level / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected
