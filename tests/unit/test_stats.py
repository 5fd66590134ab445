"""Statistics against published values, enumeration and simulation."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from scipy.stats import binomtest

from surgery.stats import at_least, bootstrap_mean, holm, mcnemar, wilson


class TestWilson:
    @pytest.mark.parametrize(
        ("successes", "n", "low", "high"),
        [
            (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I, method 3
            (15, 148, 0.0624, 0.1605),
            (0, 20, 0.0000, 0.1611),
            (1, 29, 0.0061, 0.1718),
        ],
    )
    def test_published_values(self, successes: int, n: int, low: float, high: float) -> None:
        found = wilson(successes, n)
        assert (round(found.low, 4), round(found.high, 4)) == (low, high)
        assert found.value == successes / n and found.n == n

    def test_edges_are_not_empty_and_stay_inside(self) -> None:
        assert wilson(0, 10).low == 0 < wilson(0, 10).high < 1
        assert wilson(10, 10).high == 1 > wilson(10, 10).low > 0
        assert (wilson(0, 0).low, wilson(0, 0).high) == (0, 1)

    def test_limits_solve_the_score_equation(self) -> None:
        """A limit p is where |k/n - p| is z standard errors, the error being that of p itself."""
        for k, n in [(3, 7), (1, 50), (49, 50), (500, 1000)]:
            for p in (wilson(k, n).low, wilson(k, n).high):
                assert abs(k / n - p) == pytest.approx(1.959963984540054 * (p * (1 - p) / n) ** 0.5)

    def test_agrees_with_the_formula(self) -> None:
        z = 1.959963984540054
        for n in (*range(1, 60), 400, 5000):
            for k in range(0, n + 1, max(1, n // 50)):
                p = k / n
                centre = (p + z * z / (2 * n)) / (1 + z * z / n)
                half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
                interval = wilson(k, n)
                expected = (max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half)))
                assert (interval.low, interval.high) == pytest.approx(expected, rel=0, abs=4e-16)

    def test_symmetric(self) -> None:
        assert wilson(3, 11).low == pytest.approx(1 - wilson(8, 11).high)


class TestMcnemar:
    @staticmethod
    def _p(lost: int, won: int, agree: int = 4) -> float:
        before = np.array([True] * lost + [False] * won + [True, False] * agree)
        after = np.array([False] * lost + [True] * won + [True, False] * agree)
        return mcnemar(before, after)

    @pytest.mark.parametrize("lost", range(6))
    @pytest.mark.parametrize("won", range(6))
    def test_equals_enumeration(self, lost: int, won: int) -> None:
        """Every way in which fair coins could have decided the pairs that differ."""
        ways = [sum(flips) >= lost for flips in product((0, 1), repeat=lost + won)]
        assert self._p(lost, won) == pytest.approx(sum(ways) / len(ways))

    def test_is_one_sided_and_ignores_pairs_that_agree(self) -> None:
        assert self._p(8, 0) == 2**-8 and self._p(0, 8) == 1
        assert self._p(5, 2, agree=0) == self._p(5, 2, agree=90)

    def test_many_discordant_prompts(self) -> None:
        assert self._p(1500, 1500) == pytest.approx(0.5, abs=0.01) and 0 < self._p(1000, 0) < 1e-300

    def test_agrees_with_scipy(self) -> None:
        for n in (1, 7, 30, 105, 400):
            for lost in range(0, n + 1, max(1, n // 30)):
                expected = binomtest(lost, n, alternative="greater").pvalue
                assert self._p(lost, n - lost, agree=0) == pytest.approx(expected, rel=1e-12, abs=8e-16)

    def test_many_pairs(self) -> None:
        assert self._p(700, 500) == pytest.approx(4.61e-9, rel=0.1)  # the normal tail at 199 / sqrt(1200)
        assert 0 < self._p(900, 0) < 1e-200


def test_a_tail_agrees_with_scipy() -> None:
    for n, p in ((1, 0.5), (30, 0.125), (200, 1 / 64), (400, 0.0)):
        for successes in range(0, n + 1, max(1, n // 20)):
            expected = binomtest(successes, n, p, alternative="greater").pvalue
            assert at_least(successes, n, p) == pytest.approx(expected, rel=1e-9)


class TestHolm:
    def test_by_hand(self) -> None:
        """0.01 <= .05/4, 0.015 <= .05/3, but 0.03 > .05/2: it and all above it stay."""
        assert holm([0.03, 0.01, 0.04, 0.015]) == [False, True, False, True]

    def test_stops_at_the_first_that_stays(self) -> None:
        """0.045 alone would pass .05/1."""
        assert holm([0.045, 0.03]) == [False, False]

    def test_edges(self) -> None:
        assert holm([]) == [] and holm([0.05]) == [True] and holm([0.0501]) == [False]
        assert holm([0.2], level=0.3) == [True]

    def test_bounds_the_family_wise_error(self) -> None:
        rng = np.random.default_rng(0)
        wrong = sum(any(holm(list(rng.random(20)))) for _ in range(2000))
        assert 0.03 < wrong / 2000 < 0.07


class TestBootstrapMean:
    def test_covers_the_mean(self) -> None:
        """95% intervals of 400 samples of 60 from a skewed distribution hold its mean about 95% of the time."""
        samples = np.random.default_rng(0).exponential(2.0, (400, 60))
        found = bootstrap_mean(samples, seed=1)
        covered = np.mean([i.low <= 2.0 <= i.high for i in found])
        assert 0.88 < covered < 0.98
        for interval, sample in zip(found, samples, strict=True):
            assert interval.value == pytest.approx(sample.mean()) and interval.n == 60
            assert interval.low < interval.value < interval.high

    def test_is_as_wide_as_the_standard_error(self) -> None:
        x = np.random.default_rng(0).normal(1, 3, (1, 400))
        (found,) = bootstrap_mean(x, seed=0)
        assert found.high - found.low == pytest.approx(2 * 1.96 * 3 / 20, rel=0.1)

    def test_resamples_rows_together(self) -> None:
        """Paired: the same prompts for every row, so intervals of a row and of twice the row agree."""
        x = np.random.default_rng(0).normal(size=(1, 30))
        one, two = bootstrap_mean(np.concatenate([x, 2 * x]), seed=3)
        assert (2 * one.low, 2 * one.high) == pytest.approx((two.low, two.high))

    def test_same_seed_same_interval(self) -> None:
        x = np.random.default_rng(0).normal(size=(2, 30))
        assert bootstrap_mean(x, 5) == bootstrap_mean(x, 5) != bootstrap_mean(x, 6)

    def test_constant(self) -> None:
        (found,) = bootstrap_mean(np.full((1, 7), 0.25), 0)
        assert (found.low, found.value, found.high) == pytest.approx((0.25, 0.25, 0.25))
