"""Per-prompt scores, their intervals over prompts, and the roles of heads.

An item is a set of heads measured together: a single head, or all heads of a mixer. A search stops measuring some items
early. Their scores on the remaining prompts are NaN.

Shape legend: N prompts, B prompts of one batch, C items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from surgery.data.ranking import ChoiceScores
from surgery.recipe.methods import all_columns
from surgery.stats import bootstrap_mean, holm, means_are_positive
from surgery.types import Interval, Role

Array = NDArray[np.float64]
_SHARE = 0.05  # of the lead, which a head with a role carries at least. With 256 prompts every sixth head loses some


@dataclass
class Record:
    """Scores of one batch.

    Attributes:
        index: index of the batch.
        clean: (3,B) margins of the clean model, 1 or 0 for right or wrong, and leads.
        columns: column -> (C,3,B), the same for the changed models.
        estimates: column -> (C,B), numbers in the column's own unit.
    """

    index: int
    clean: Array
    columns: dict[str, Array] = field(default_factory=dict)
    estimates: dict[str, Array] = field(default_factory=dict)


def plain(scores: ChoiceScores) -> Array:
    """(3,B) margins, 1 or 0 for right or wrong, and leads."""
    return np.stack([values.double().cpu().numpy() for values in (scores.margin, scores.correct, scores.lead)])


class Table:
    """Records of all batches, in the order of the batches."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = sorted(records, key=lambda record: record.index)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that score changed models by margin and accuracy."""
        return tuple(self._records[0].columns)

    @property
    def estimates(self) -> tuple[str, ...]:
        """Columns of estimates, each in its own unit."""
        return tuple(self._records[0].estimates)

    def clean_margin(self) -> Array:
        """(N,) margins of the clean model, in logits."""
        return np.concatenate([r.clean[0] for r in self._records])

    def clean_correct(self) -> NDArray[np.bool_]:
        """(N,) True if the clean model is right."""
        return np.concatenate([r.clean[1] for r in self._records]) > 0

    def margin(self, column: str) -> Array:
        """(C,N) margins of the changed models, in logits."""
        return np.concatenate([r.columns[column][:, 0] for r in self._records], axis=1)

    def correct(self, column: str) -> Array:
        """(C,N) 1 if the changed model is right, 0 if it is wrong, NaN if it was not measured."""
        return np.concatenate([r.columns[column][:, 1] for r in self._records], axis=1)

    def clean_lead(self) -> Array:
        """(N,) leads of the clean model, in logits."""
        return np.concatenate([r.clean[2] for r in self._records])

    def lead(self, column: str) -> Array:
        """(C,N) leads of the changed models, in logits."""
        return np.concatenate([r.columns[column][:, 2] for r in self._records], axis=1)

    def estimate(self, column: str) -> Array:
        """(C,N) estimates, in the column's own unit."""
        return np.concatenate([r.estimates[column] for r in self._records], axis=1)

    def effect(self, column: str) -> Array:
        """(C,N) effect of each item, larger for more important ones: margin lost or gained, or the estimate."""
        if column in self.estimates:
            return self.estimate(column)
        return sign_of(column) * (self.margin(column) - self.clean_margin())


def sign_of(column: str) -> int:
    """+1 for a column of gains, -1 for one of losses."""
    return 1 if all_columns()[column].effect == "gain" else -1


def intervals(values_CN: Array, seed: int) -> list[Interval]:
    """95% interval of each row's mean, over the prompts on which it was measured."""
    measured = ~np.isnan(values_CN)
    by_row: dict[int, Interval] = {}
    for count in np.unique(measured.sum(1)):
        rows = np.flatnonzero(measured.sum(1) == count)
        values = values_CN[rows][:, measured[rows[0]]]
        none = [Interval(0.0, 0.0, 0.0, 0)] * len(rows)
        by_row |= dict(zip(rows.tolist(), bootstrap_mean(values, seed) if count else none, strict=True))
    return [by_row[row] for row in range(len(values_CN))]


def scores_of(table: Table, seed: int) -> dict[str, list[Interval]]:
    """By column, an interval for each item: margins in logits, each followed by `COLUMN_accuracy`; then estimates."""
    right = table.clean_correct()
    scores: dict[str, list[Interval]] = {}
    for column in table.columns:
        scores[column] = intervals(table.effect(column), seed)
        scores[f"{column}_accuracy"] = intervals(sign_of(column) * (table.correct(column) - right), seed)
    for column in table.estimates:
        scores[column] = intervals(table.estimate(column), seed)
    return scores


def roles_of(table: Table, heads: int) -> list[Role]:
    """Test which heads are Gather heads (needed in the context) and Aggregate heads (needed at the query).

    Each head and position gets a one-sided t-test that its ablation loses more than a twentieth of the right answer's
    lead (`ChoiceScores.lead`). Holm's correction covers all of them together: in a model that does not retrieve, the
    probability that any head gets a role is at most 0.05. Answers would be too coarse: where many heads retrieve, each
    one alone decides few of them. Heads that a search dropped count as tests but are `unmeasured`, as all are if
    neither position was measured or there is a single prompt. `heads` is their number; they are the first items.
    """
    roles: dict[str, Role] = {"context": "gather", "query": "aggregate"}
    by_role = {role: table.lead(column)[:heads] for column, role in roles.items() if column in table.columns}
    if not by_role:
        return ["unmeasured"] * heads
    most = (1 - _SHARE) * table.clean_lead()
    p_values = np.stack([means_are_positive(most - lead) for lead in by_role.values()])
    rejected = np.reshape(holm(np.nan_to_num(p_values, nan=1.0).ravel().tolist()), p_values.shape)

    def role_of(head: int) -> Role:
        if np.isnan(p_values[:, head]).any():
            return "unmeasured"
        found = [role for role, is_rejected in zip(by_role, rejected[:, head], strict=True) if is_rejected]
        return "both" if len(found) == 2 else found[0] if found else "neither"

    return [role_of(head) for head in range(heads)]
