"""Regret of every chooser: how far its heads stay behind the best tried set of as many heads.

Shape legend: N evaluation prompts, the same for every arm and seed of a base.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bench.studies.head_choice.arms import COLUMNS, Choices, heads_chosen, in_order
from bench.studies.head_choice.choosers import CHOOSERS, ROWS
from surgery.stats import bootstrap_mean
from surgery.types import Interval

Heads = tuple[str, ...]
Answers = NDArray[np.float64]  # (N,) 1 for a right answer, 0 for a wrong one


@dataclass(frozen=True)
class Results:
    """All finished choices and arms.

    Attributes:
        choices: (base, seed) -> content of the file; see `choosers.measure`.
        answers: (base, seed) -> heads -> answers. No heads: trained without a splice.
        designs: (base, seed) -> name in `DESIGNS` -> heads -> answers.
    """

    choices: Mapping[tuple[str, int], Choices]
    answers: Mapping[tuple[str, int], Mapping[Heads, Answers]]
    designs: Mapping[tuple[str, int], Mapping[str, Mapping[Heads, Answers]]] = field(default_factory=dict)

    def of_design(self, name: str) -> Results:
        """The same choices with the arms of another branch."""
        return Results(self.choices, {place: designs.get(name, {}) for place, designs in self.designs.items()})

    def seeds(self, base: str) -> list[int]:
        """Seeds for which heads were chosen."""
        return sorted(seed for name, seed in self.choices if name == base)

    def tried(self, base: str, seed: int, count: int) -> dict[Heads, Answers]:
        """The trained sets of this many heads, whoever chose them."""
        return {heads: x for heads, x in self.answers.get((base, seed), {}).items() if len(heads) == count}

    def chosen(self, base: str, seed: int, column: str) -> dict[str, Heads | None]:
        """Chooser -> its heads; None if it was not measured."""
        choices = self.choices[base, seed]
        names = [name for name in ROWS if name in CHOOSERS or name in choices["choosers"]]
        return {name: heads_chosen(choices, name, column) for name in names}

    def finished(self, base: str, seed: int, column: str) -> tuple[int, int]:
        """Number of choosers whose arm is finished, and of all choosers."""
        trained, chosen = self.answers.get((base, seed), {}), self.chosen(base, seed, column)
        return sum(heads in trained for heads in chosen.values()), len(chosen)

    def complete_seeds(self, base: str, column: str) -> list[int]:
        """Seeds for which the arms of all choosers are finished. Only these have a regret."""
        counts = ((seed, self.finished(base, seed, column)) for seed in self.seeds(base))
        return [seed for seed, (done, wanted) in counts if done == wanted]


def best_set(tried: Mapping[Heads, Answers]) -> Heads:
    """The set with the most right answers; of equal ones, the first by name."""
    return min(tried, key=lambda heads: (-float(tried[heads].mean()), in_order(heads)))


def accuracy(results: Results, base: str, chooser: str, column: str) -> Interval | None:
    """Mean accuracy of a chooser's finished arms over seeds, by the bootstrap over prompts. None without an arm."""
    answers = []
    for seed in results.seeds(base):
        heads = results.chosen(base, seed, column).get(chooser)
        if heads is not None and heads in results.answers.get((base, seed), {}):
            answers.append(results.answers[base, seed][heads])
    return mean_over_seeds(answers)


def mean_over_seeds(answers: Sequence[Answers]) -> Interval | None:
    """Mean over seeds with a 95% bootstrap interval over the shared prompts; `n` is the number of seeds."""
    if not answers:
        return None
    (interval,) = bootstrap_mean(np.stack(answers).mean(0)[None], 0)
    return Interval(interval.value, interval.low, interval.high, len(answers))


def regrets(results: Results, base: str, column: str) -> dict[str, Interval]:
    """Regret of every chooser in points of accuracy, as a mean over the complete seeds.

    For each seed, the best set is that with the highest accuracy among all trained sets of as many heads. The interval
    is the paired bootstrap over prompts, for these best sets and these trainings.

    Returns:
        Chooser -> regret; `n` is the number of seeds. Empty if no seed is complete.
    """
    losses: dict[str, list[Answers]] = {name: [] for name in ROWS}
    for seed in results.complete_seeds(base, column):
        for name, heads in results.chosen(base, seed, column).items():
            assert heads is not None, "a complete seed has all choices"
            tried = results.tried(base, seed, len(heads))
            losses[name].append(100 * (tried[best_set(tried)] - tried[heads]))
    means = {name: mean_over_seeds(values) for name, values in losses.items()}
    return {name: interval for name, interval in means.items() if interval is not None}


def best_accuracy(results: Results, base: str, column: str) -> tuple[float, float] | None:
    """Accuracy of the best tried sets of as many heads as the oracle read chooses, as a mean over the complete seeds.

    The best of several sets is partly the luckiest one. So each set is also chosen on one half of the prompts and
    measured on the other: the difference between both numbers is the part of every regret that is luck with prompts.

    Returns:
        On the prompts that chose the set, and on the other half. None if no seed is complete.
    """
    same, other = [], []
    for seed in results.complete_seeds(base, column):
        tried = results.tried(base, seed, len(results.chosen(base, seed, column)["oracle"] or ()))
        same.append(float(tried[best_set(tried)].mean()))
        for half in (0, 1):
            best = best_set({heads: answers[half::2] for heads, answers in tried.items()})
            other.append(float(tried[best][1 - half :: 2].mean()))
    return (float(np.mean(same)), float(np.mean(other))) if same else None


@dataclass(frozen=True)
class Worst:
    """Largest regret of a chooser over bases and columns.

    Attributes:
        regret: in points; `n` is the number of seeds.
        base, column: where it occurs.
        measured, wanted: number of pairs of base and column that have a regret, and of all pairs.
    """

    regret: Interval
    base: str
    column: str
    measured: int
    wanted: int


def worst_cases(results: Results, bases: Sequence[str], columns: Sequence[str] = COLUMNS) -> dict[str, Worst]:
    """The largest regret of every chooser over these bases and columns. Empty if nothing is complete."""
    measured = dict(_measured(results, bases, columns))
    worst = {}
    for name in ROWS if measured else ():
        base, column = max(measured, key=lambda place: measured[place][name].value)
        wanted = len(bases) * len(columns)
        worst[name] = Worst(measured[base, column][name], base, column, len(measured), wanted)
    return worst


def _measured(
    results: Results, bases: Sequence[str], columns: Sequence[str]
) -> Iterator[tuple[tuple[str, str], dict[str, Interval]]]:
    for base in bases:
        for column in columns:
            if found := regrets(results, base, column):
                yield (base, column), found
