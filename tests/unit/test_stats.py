"""Statistics against published values, enumeration and simulation."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy.stats import binomtest

from surgery.stats import at_least, bootstrap_mean, holm, mcnemar, wilson

Z = 1.959963984540054  # 97.5% quantile of the normal distribution


def test_wilson_has_published_values_and_stays_inside() -> None:
    for successes, n, low, high in (
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I, method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        found = wilson(successes, n)
        assert (round(found.low, 4), round(found.high, 4)) == (low, high)
        assert found.value == successes / n and found.n == n
    assert wilson(0, 10).low == 0 < wilson(0, 10).high < 1
    assert wilson(10, 10).high == 1 > wilson(10, 10).low > 0
    assert (wilson(0, 0).low, wilson(0, 0).high) == (0, 1)


def p_value(lost: int, won: int, agree: int = 4) -> float:
    before = np.array([True] * lost + [False] * won + [True, False] * agree)
    after = np.array([False] * lost + [True] * won + [True, False] * agree)
    return mcnemar(before, after)


def test_mcnemar_equals_enumeration_and_scipy() -> None:
    for lost, won in product(range(6), repeat=2):
        # Every way in which fair coins could have decided the pairs that differ.
        ways = [sum(flips) >= lost for flips in product((0, 1), repeat=lost + won)]
        assert p_value(lost, won) == pytest.approx(sum(ways) / len(ways)), (lost, won)
    for n in (1, 7, 30, 105, 400):
        for lost in range(0, n + 1, max(1, n // 30)):
            expected = binomtest(lost, n, alternative="greater").pvalue
            assert p_value(lost, n - lost, agree=0) == pytest.approx(expected, rel=1e-12, abs=8e-16), (lost, n)


def test_a_tail_agrees_with_scipy() -> None:
    for n, p in ((1, 0.5), (30, 0.125), (200, 1 / 64), (400, 0.0)):
        for successes in range(0, n + 1, max(1, n // 20)):
            expected = binomtest(successes, n, p, alternative="greater").pvalue
            assert at_least(successes, n, p) == pytest.approx(expected, rel=1e-9), (successes, n, p)


def test_holm_by_hand_and_by_simulation() -> None:
    # 0.01 <= .05/4, 0.015 <= .05/3, but 0.03 > .05/2: it and all above it stay.
    assert holm([0.03, 0.01, 0.04, 0.015]) == [False, True, False, True]
    assert holm([0.045, 0.03]) == [False, False], "0.045 alone would pass .05/1"
    assert holm([]) == [] and holm([0.05]) == [True] and holm([0.0501]) == [False]
    assert holm([0.2], level=0.3) == [True]
    rng = np.random.default_rng(0)
    wrong = sum(any(holm(list(rng.random(20)))) for _ in range(2000))
    assert 0.03 < wrong / 2000 < 0.07


def test_bootstrap_intervals_cover_the_mean() -> None:
    """95% intervals of 400 samples of 60 from a skewed distribution hold its mean about 95% of the time."""
    samples = np.random.default_rng(0).exponential(2.0, (400, 60))
    found = bootstrap_mean(samples, seed=1)
    assert 0.88 < np.mean([i.low <= 2.0 <= i.high for i in found]) < 0.98
    for interval, sample in zip(found, samples, strict=True):
        assert interval.value == pytest.approx(sample.mean()) and interval.n == 60
        assert interval.low < interval.value < interval.high
    (wide,) = bootstrap_mean(np.random.default_rng(0).normal(1, 3, (1, 400)), seed=0)
    assert wide.high - wide.low == pytest.approx(2 * Z * 3 / 20, rel=0.1), "as wide as the standard error"


def test_bootstrap_rows_share_the_resampled_prompts() -> None:
    x = np.random.default_rng(0).normal(size=(1, 30))
    one, two = bootstrap_mean(np.concatenate([x, 2 * x]), seed=3)
    assert (2 * one.low, 2 * one.high) == pytest.approx((two.low, two.high))
    assert bootstrap_mean(x, 5) == bootstrap_mean(x, 5) != bootstrap_mean(x, 6)
    (found,) = bootstrap_mean(np.full((1, 7), 0.25), 0)
    assert (found.low, found.value, found.high) == pytest.approx((0.25, 0.25, 0.25))
