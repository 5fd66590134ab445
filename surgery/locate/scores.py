"""Per-prompt scores, their intervals over prompts, and the roles of heads.

An item is a set of heads measured together: a single head, or all heads of a mixer.

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
        clean: (3,B) margins of the clean model, 1 or 0 for right or wrong, and leads.
        columns: column -> (C,3,B), the same for the changed models.
        estimates: column -> (C,B), numbers in the column's own unit.
    """

    clean: Array
    columns: dict[str, Array] = field(default_factory=dict)
    estimates: dict[str, Array] = field(default_factory=dict)


def plain(scores: ChoiceScores) -> Array:
    """(3,B) margins, 1 or 0 for right or wrong, and leads."""
    return np.stack([values.double().cpu().numpy() for values in (scores.margin, scores.correct, scores.lead)])


class Table:
    """Records of all batches, in the order of the batches.

    Attributes:
        clean: (3,N), as in `Record`.
        columns: by column, (C,3,N), the same for the changed models.
        estimates: by column, (C,N).
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self.clean = np.concatenate([r.clean for r in records], -1)
        self.columns = {c: np.concatenate([r.columns[c] for r in records], -1) for c in records[0].columns}
        self.estimates = {c: np.concatenate([r.estimates[c] for r in records], -1) for c in records[0].estimates}

    def effect(self, column: str) -> Array:
        """(C,N) effect of each item, larger for more important ones: margin lost or gained, or the estimate."""
        if column in self.estimates:
            return self.estimates[column]
        return sign_of(column) * (self.columns[column][:, 0] - self.clean[0])


def sign_of(column: str) -> int:
    """+1 for a column of gains, -1 for one of losses."""
    return 1 if all_columns()[column].effect == "gain" else -1


def intervals(values_CN: Array, seed: int) -> list[Interval]:
    """95% interval of each row's mean over prompts. A row of NaN, for an item without an estimate, has no prompts."""
    measured = iter(bootstrap_mean(values_CN[~np.isnan(values_CN[:, 0])], seed))
    return [Interval(0.0, 0.0, 0.0, 0) if np.isnan(row[0]) else next(measured) for row in values_CN]


def scores_of(table: Table, seed: int) -> dict[str, list[Interval]]:
    """By column, an interval for each item: margins in logits, each followed by `COLUMN_accuracy`; then estimates."""
    scores: dict[str, list[Interval]] = {}
    for column, values in table.columns.items():
        scores[column] = intervals(table.effect(column), seed)
        scores[f"{column}_accuracy"] = intervals(sign_of(column) * (values[:, 1] - table.clean[1]), seed)
    for column in table.estimates:
        scores[column] = intervals(table.effect(column), seed)
    return scores


def roles_of(table: Table, heads: int) -> list[Role]:
    """Test which heads are Gather heads (needed in the context) and Aggregate heads (needed at the query).

    Each head and position gets a one-sided t-test that its ablation loses more than a twentieth of the right answer's
    lead (`ChoiceScores.lead`). Holm's correction covers all of them together: in a model that does not retrieve, the
    probability that any head gets a role is at most 0.05. Answers would be too coarse: where many heads retrieve, each
    one alone decides few of them. All are `unmeasured` if neither position was measured or there is a single prompt.
    `heads` is their number; they are the first items.
    """
    roles: dict[str, Role] = {"context": "gather", "query": "aggregate"}
    by_role = {roles[c]: values[:heads, 2] for c, values in table.columns.items() if c in roles}
    if not by_role:
        return ["unmeasured"] * heads
    most = (1 - _SHARE) * table.clean[2]
    p_values = np.stack([means_are_positive(most - lead) for lead in by_role.values()])
    rejected = np.reshape(holm(np.nan_to_num(p_values, nan=1.0).ravel().tolist()), p_values.shape)

    def role_of(head: int) -> Role:
        if np.isnan(p_values[:, head]).any():
            return "unmeasured"
        found = [role for role, is_rejected in zip(by_role, rejected[:, head], strict=True) if is_rejected]
        return "both" if len(found) == 2 else found[0] if found else "neither"

    return [role_of(head) for head in range(heads)]
