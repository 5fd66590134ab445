"""Statistics of the arms: pooling over seeds, paired tests, correlations.

Every arm of every seed answers the same prompts. A pair is (prompt, seed): seeds differ in training documents and in
random choices, not in prompts. Intervals over pooled seeds therefore hold for these prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import pearsonr, rankdata, spearmanr

from bench.studies.site_selection.arms import LAYER_METHODS, Choices, head_name, layer_chosen, layer_name, layer_of
from surgery.stats import holm, mcnemar, wilson
from surgery.types import Interval

BySeed = Mapping[int, Mapping[str, Any]]  # seed -> result of an arm
RESAMPLES = 2000


@dataclass(frozen=True)
class Results:
    """All finished arms and choices.

    Attributes:
        arms: (base, arm) -> seed -> result.
        choices: (base, seed) -> what each method chose.
    """

    arms: Mapping[tuple[str, str], BySeed]
    choices: Mapping[tuple[str, int], Choices]

    def arm(self, base: str, name: str) -> BySeed:
        return self.arms.get((base, name), {})

    def seeds(self, base: str) -> list[int]:
        """Seeds for which sites were chosen."""
        return sorted(seed for name, seed in self.choices if name == base)

    def method(self, base: str, method: str) -> BySeed:
        """seed -> the arm that the method chose with that seed's prompts."""
        found = {}
        for seed in self.seeds(base):
            result = self.arm(base, self.chosen(base, method, seed)).get(seed)
            if result is not None:
                found[seed] = result
        return found

    def chosen(self, base: str, method: str, seed: int) -> str:
        """The name of the arm that the method chose."""
        choices = self.choices[base, seed]
        if method in LAYER_METHODS:
            return layer_name(layer_chosen(choices, method))
        return head_name(choices["methods"][method][0])


def accuracy(arm: BySeed, pairs: int) -> Interval | None:
    """Accuracy over all seeds; None without results. Raises KeyError if that number of pairs was not evaluated."""
    right = "".join(result["correct"][f"kv_retrieval/{pairs}"] for result in arm.values())
    return wilson(right.count("1"), len(right)) if right else None


def of_seed(result: Mapping[str, Any], pairs: int) -> float:
    return float(result["summary"]["kv_retrieval"][str(pairs)]["accuracy"])


def mean_of(arm: BySeed, read: Callable[[Mapping[str, Any]], float]) -> float:
    """Mean over seeds; NaN without results."""
    return float(np.mean([read(result) for result in arm.values()])) if arm else math.nan


def mean_at(arm: BySeed, pairs: int) -> float:
    """Mean accuracy over seeds."""
    return mean_of(arm, lambda result: of_seed(result, pairs))


@dataclass(frozen=True)
class Paired:
    """Paired comparison of two arms on the same prompts.

    Attributes:
        difference: of the accuracies, over the seeds that both have.
        p: exact two-sided McNemar.
        wins: seeds in which the first is better; `seeds`: how many they share.
    """

    difference: float
    p: float
    wins: int
    seeds: int


def paired(first: BySeed, second: BySeed, pairs: int) -> Paired | None:
    """Compare two arms on their common seeds; None if they have none."""
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    a, b = (
        [np.array(list(arm[s]["correct"][f"kv_retrieval/{pairs}"])) == "1" for s in seeds] for arm in (first, second)
    )
    whole_a, whole_b = np.concatenate(a), np.concatenate(b)
    p = min(1.0, 2 * min(mcnemar(whole_a, whole_b), mcnemar(whole_b, whole_a)))
    wins = sum(int(x.mean() > y.mean()) for x, y in zip(a, b, strict=True))
    return Paired(float(whole_a.mean() - whole_b.mean()), p, wins, len(seeds))


def family(tests: Mapping[str, Paired | None]) -> dict[str, bool]:
    """True for each significant difference, at a family-wise error of 0.05 (Holm)."""
    there = {name: test.p for name, test in tests.items() if test is not None}
    return dict(zip(there, holm(list(there.values())), strict=True))


@dataclass(frozen=True)
class Site:
    """A head that was trained as the only site: its predictors and its measured gain, as means over seeds."""

    head: str
    predicted: Mapping[str, float]
    gain: float
    seeds: tuple[float, ...]


def sites(results: Results, base: str, pairs: int) -> list[Site]:
    """All heads whose arm and control are finished, in order. The gain is relative to no splice with the same seed."""
    control = results.arm(base, "no-splice")
    found = []
    for head in results.choices[base, results.seeds(base)[0]]["scores"] if results.seeds(base) else ():
        arm = results.arm(base, head_name(head))
        seeds = sorted(arm.keys() & control.keys())
        if not seeds:
            continue
        gains = tuple(of_seed(arm[s], pairs) - of_seed(control[s], pairs) for s in seeds)
        scores = [results.choices[base, s]["scores"][head] for s in seeds]
        predicted = {name: float(np.mean([score[name] for score in scores])) for name in scores[0]}
        found.append(Site(head, predicted, float(np.mean(gains)), gains))
    return found


@dataclass(frozen=True)
class Correlation:
    """Correlations with 95% percentile intervals, from resampled sites."""

    spearman: Interval
    pearson: Interval


def correlation(predicted: Sequence[float], reached: Sequence[float], seed: int = 0) -> Correlation | None:
    """Correlate predictions and gains; None for fewer than 4 sites, or if either does not vary."""
    x, y = np.asarray(predicted, float), np.asarray(reached, float)
    if len(x) < 4 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    draws_RN = np.random.default_rng(seed).integers(0, len(x), (RESAMPLES, len(x)))
    draws_RN = draws_RN[(np.ptp(x[draws_RN], axis=1) > 0) & (np.ptp(y[draws_RN], axis=1) > 0)]

    def interval(value: float, resampled_R: NDArray[np.float64]) -> Interval:
        low, high = np.percentile(resampled_R, [2.5, 97.5])
        return Interval(float(value), float(low), float(high), len(x))

    x_RN, y_RN = x[draws_RN], y[draws_RN]
    return Correlation(
        interval(spearmanr(x, y).statistic, _pearson_of_rows(rankdata(x_RN, axis=1), rankdata(y_RN, axis=1))),
        interval(pearsonr(x, y).statistic, _pearson_of_rows(x_RN, y_RN)),
    )


def _pearson_of_rows(x_RN: NDArray[np.float64], y_RN: NDArray[np.float64]) -> NDArray[np.float64]:
    """Pearson correlation of each row."""
    x_RN, y_RN = (a - a.mean(1, keepdims=True) for a in (x_RN, y_RN))
    return (x_RN * y_RN).sum(1) / np.sqrt((x_RN**2).sum(1) * (y_RN**2).sum(1))


@dataclass(frozen=True)
class Spread:
    """Standard deviations of the gain in accuracy: between heads of the winning layer, layers, and seeds."""

    winning: int
    within: float
    between: float
    noise: float
    layers: Mapping[int, float]


def spread(found: Sequence[Site], winning: int) -> Spread | None:
    """Split the variance of the gain by layer and head; None with fewer than two layers, or heads of the best layer."""
    by_layer: dict[int, list[float]] = {}
    for site in found:
        by_layer.setdefault(layer_of(site.head), []).append(site.gain)
    if len(by_layer) < 2 or len(by_layer.get(winning, ())) < 2:
        return None
    means = {layer: float(np.mean(gains)) for layer, gains in sorted(by_layer.items())}
    repeated = [np.var(site.seeds, ddof=1) for site in found if len(site.seeds) > 1]
    noise = math.sqrt(float(np.mean(repeated))) if repeated else math.nan
    within = float(np.std(by_layer[winning], ddof=1))
    return Spread(winning, within, float(np.std(list(means.values()), ddof=1)), noise, means)


def gap_closed(arm: float, control: float, transformer: float) -> float:
    """Gap closed: (arm - control) / (transformer - control); NaN without a gap."""
    return (arm - control) / (transformer - control) if transformer > control else math.nan
