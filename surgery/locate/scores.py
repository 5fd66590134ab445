"""What was measured, prompt by prompt. Owns: the arrays, and intervals over prompts. Must never know: models.

An item is a set of heads measured together: a single head, or all of one mixer. A search stops measuring some of them
early, so an item's numbers may end before the last prompt: NaN from there on.

Shape legend: N prompts, B prompts of one batch, C items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from surgery.scoring.ranking import ChoiceScores
from surgery.stats import bootstrap_mean
from surgery.types import Interval

Array = NDArray[np.float64]


@dataclass
class Record:
    """One batch.

    Attributes:
        index: of the batch, whichever process measured it.
        clean: (2,B) margins, and 1 or 0 for right or wrong.
        columns: column -> (C,2,B), the same of the changed models.
        estimates: column -> (C,B) what a method says that removing the item costs, in its own unit.
    """

    index: int
    clean: Array
    columns: dict[str, Array] = field(default_factory=dict)
    estimates: dict[str, Array] = field(default_factory=dict)


def plain(scores: ChoiceScores) -> Array:
    """(2,B)."""
    return np.stack([scores.margin.double().cpu().numpy(), scores.correct.double().cpu().numpy()])


def spread(values: Sequence[Array], places: Sequence[int], items: int) -> Array:
    """The measured items' values in an array of all items; NaN for the others."""
    shape = values[0].shape if values else ()
    whole = np.full((items, *shape), np.nan)
    whole[list(places)] = np.stack(values)
    return whole


class Table:
    """All batches together, in their order."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = sorted(records, key=lambda record: record.index)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._records[0].columns)

    @property
    def estimates(self) -> tuple[str, ...]:
        return tuple(self._records[0].estimates)

    def clean_margin(self) -> Array:
        """(N,)"""
        return np.concatenate([r.clean[0] for r in self._records])

    def clean_correct(self) -> NDArray[np.bool_]:
        """(N,)"""
        return np.concatenate([r.clean[1] for r in self._records]) > 0

    def margin(self, column: str) -> Array:
        """(C,N)"""
        return np.concatenate([r.columns[column][:, 0] for r in self._records], axis=1)

    def correct(self, column: str) -> Array:
        """(C,N) 1, 0 or NaN"""
        return np.concatenate([r.columns[column][:, 1] for r in self._records], axis=1)

    def estimate(self, column: str) -> Array:
        """(C,N)"""
        return np.concatenate([r.estimates[column] for r in self._records], axis=1)


def intervals(values_CN: Array, seed: int) -> list[Interval]:
    """95% intervals of each row's mean over the prompts that it has."""
    measured = ~np.isnan(values_CN)
    found: dict[int, Interval] = {}
    for count in np.unique(measured.sum(1)):
        rows = np.flatnonzero(measured.sum(1) == count)
        own = values_CN[rows][:, measured[rows[0]]]
        none = [Interval(0.0, 0.0, 0.0, 0)] * len(rows)
        found |= dict(zip(rows.tolist(), bootstrap_mean(own, seed) if count else none, strict=True))
    return [found[row] for row in range(len(values_CN))]


def scores_of(table: Table, signs: Mapping[str, int], seed: int) -> dict[str, list[Interval]]:
    """Column -> an interval for each item, in logits; `COLUMN_accuracy` beside it; estimates in their own unit.

    Args:
        signs: +1 for columns of gains; losses otherwise.
    """
    clean, right = table.clean_margin(), table.clean_correct()
    scores: dict[str, list[Interval]] = {}
    for column in table.columns:
        sign = signs.get(column, -1)
        scores[column] = intervals(sign * (table.margin(column) - clean), seed)
        scores[f"{column}_accuracy"] = intervals(sign * (table.correct(column) - right), seed)
    for column in table.estimates:
        scores[column] = intervals(table.estimate(column), seed)
    return scores
