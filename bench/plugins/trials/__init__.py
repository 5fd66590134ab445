"""Choose heads by training candidates: locating methods that splice and train.

    PYTHONPATH=. surgery locate quickstart plugins=[bench.plugins.trials] locate.methods=[patching,sharpen,gates] \\
        splice.select=gates 'locate.method_options={gates: {steps: 80, candidates: 12}}'
    PYTHONPATH=. surgery locate quickstart plugins=[bench.plugins.trials] locate.methods=[patching,sharpen,trial] \\
        splice.select=trial 'locate.method_options={trial: {steps: 32, candidates: 8}}'

`gates` trains all candidates together behind gates, `trial` trains them one at a time by successive halving. Both were
worse than `patching`: paper/HEAD_CHOICE.md. Imports no torch, as recipes are validated with this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from surgery.recipe.methods import Column, Training, register_method
from surgery.recipe.section import Positive

if TYPE_CHECKING:
    from surgery.locate.methods import Candidates, TrainedScores


class Trained(Training):
    """Short training of candidate heads on the frozen base, on prompts of the training split."""

    lr: float = Field(6e-3, gt=0, le=1, description="Learning rate of the candidates' attention branches.")
    rows: Positive = Field(16, description="Training documents per step, each with up to 4 questions.")


class Gates(Trained):
    """Train all candidate heads together, each behind a gate that costs something while it is open."""

    candidates: Positive = Field(12, description="Heads that are trained. All of them are in memory together.")
    steps: Positive = Field(80, description="Training steps.")
    gate_lr: float = Field(0.1, gt=0, le=10, description="Learning rate of the gates.")
    cost: float = Field(
        0.02, ge=0, description="Cost of an open head, in nats of the answer loss. A larger cost closes more gates."
    )

    def num_steps(self, candidates: int, keep: int) -> int:
        return self.steps


class Trial(Trained):
    """Train candidate heads one at a time, and drop the worse half after each round."""

    candidates: Positive = Field(8, description="Heads that are tried.")
    steps: Positive = Field(
        32, description="Training steps of the first round. Each further round doubles the steps trained so far."
    )
    greedy: bool = Field(
        False,
        description="With several heads to choose: try the second and further ones together with those already "
        "chosen. By default the heads that are left after the last round are chosen.",
    )

    def rounds(self, candidates: int, keep: int) -> list[tuple[int, int]]:
        """Schedule of successive halving (Karnin et al. 2013): the worse half is dropped until `keep` are left.

        Returns:
            For each round, the number of candidates in it and the steps that each has been trained by its end.
        """
        counts = [candidates]
        while counts[-1] > keep:
            counts.append(max(keep, -(-counts[-1] // 2)))
        in_rounds = counts[:-1] or counts  # the last count is what remains after the last round
        return [(count, self.steps * 2**index) for index, count in enumerate(in_rounds)]

    def stages(self, candidates: int, keep: int) -> list[list[tuple[int, int]]]:
        """Schedules of the halvings: one that keeps all heads to choose or, with `greedy`, one for each of them.

        All of them have the same number of rounds, so that sets of different sizes train for equally many steps.
        """
        if not self.greedy:
            return [self.rounds(candidates, keep)]
        whole = self.rounds(candidates, 1)
        return [
            [(min(count, candidates - taken), steps) for count, steps in whole]
            for taken in range(min(keep, candidates))
        ]

    def num_steps(self, candidates: int, keep: int) -> int:
        total = 0
        for rounds in self.stages(candidates, keep):
            before = 0
            for count, steps in rounds:
                total += count * (steps - before)
                before = steps
        return total


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
    options=Gates,
)
def measure_gates(candidates: Candidates) -> TrainedScores:
    """Train all candidates together, each behind a gate that costs something while it is open."""
    from bench.plugins.trials.gates import train_gates

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
    options=Trial,
)
def measure_trials(candidates: Candidates) -> TrainedScores:
    """Splice and train candidates one at a time, by successive halving."""
    from bench.plugins.trials.halving import try_candidates

    return try_candidates(candidates)
