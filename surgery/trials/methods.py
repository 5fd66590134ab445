"""Register the locating methods that train candidates. Imports no torch, as recipes are validated with this module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import surgery.locate.methods  # noqa: F401  (registers its methods first)
from surgery.recipe.methods import Column, register_method

if TYPE_CHECKING:
    from surgery.locate.methods import Candidates, TrainedScores


@register_method(
    "gates",
    [
        Column(
            "gates", "log-probability of the answer that the trained head adds, times its gate", unit="log_probability"
        ),
        Column("gate", "probability that its gate is open, trained with a cost", unit="gate"),
    ],
    ranks=True,
    trains=True,
)
def gates(candidates: Candidates) -> TrainedScores:
    """Train all candidates together, each behind a gate that costs something while it is open."""
    from surgery.trials.gates import train_gates

    return train_gates(candidates)


@register_method(
    "trial",
    [
        Column("trial_steps", "training before the head was dropped", unit="steps"),
        Column("trial", "log-probability of the answer that the head adds after these steps", unit="log_probability"),
        Column("trial_given", "the same beside the heads chosen before (greedy)", unit="log_probability"),
    ],
    ranks=True,
    trains=True,
)
def trial(candidates: Candidates) -> TrainedScores:
    """Splice and train candidates one at a time, by successive halving."""
    from surgery.trials.halving import try_candidates

    return try_candidates(candidates)
