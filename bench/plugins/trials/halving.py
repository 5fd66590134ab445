"""Try candidate heads: splice and train each one for a few steps, and drop the worse half after each round.

Shape legend: N held-out prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.plugins.trials.training import (
    PASSES,
    TrialPrompts,
    adamw,
    constant,
    splice_candidates,
    take_step,
    trial_loss,
)
from surgery.locate.methods import Candidates, TrainedScores
from surgery.train.optimizer import spliced_parameters
from surgery.types import HeadId, ScoredHead

HeadTuple = tuple[ScoredHead, ...]  # heads that are spliced together


@dataclass(frozen=True)
class Trained:
    """State of a set of heads between two rounds.

    Attributes:
        steps: training steps so far.
        answers: (N,) log-probabilities of the answers of the held-out prompts, in nats.
        parameters: of the branches.
        optimizer: state of AdamW.
    """

    steps: int
    answers: NDArray[Any]
    parameters: list[Tensor]
    optimizer: dict[str, Any]


class Trials:
    """Train sets of heads on the same documents, one set at a time.

    Attributes:
        steps: training steps of all sets together.
        passes: work in full forward passes of one prompt.
    """

    def __init__(self, candidates: Candidates) -> None:
        self.candidates, self.budget = candidates, candidates.section.options_of("trial")
        self.prompts = TrialPrompts("trial", candidates, self.budget.rows)
        self.steps, self.passes = 0, 0.0

    def train(self, heads: HeadTuple, steps: int, before: Trained | None = None) -> Trained:
        """Train a set until it has had `steps` steps. Training in parts gives the same weights as in one."""
        hybrid, plan = splice_candidates(self.candidates, heads)
        parameters = spliced_parameters(hybrid)
        optimizer = adamw(parameters, self.budget.lr)
        if before is not None:
            with torch.no_grad():
                for parameter, value in zip(parameters, before.parameters, strict=True):
                    parameter.copy_(value)
            optimizer.load_state_dict(before.optimizer)
        begin = 0 if before is None else before.steps
        for step in range(begin, steps):
            with torch.enable_grad():
                loss = trial_loss(hybrid, plan, self.prompts.step(step))
            take_step(loss, optimizer, step, "trial")
            self.candidates.tick()
        self.steps += steps - begin
        self.passes += PASSES * (steps - begin) * self.budget.rows + self.candidates.held_out
        values = [parameter.detach() for parameter in parameters]
        return Trained(steps, self.prompts.log_probabilities(hybrid), values, optimizer.state_dict())

    def halve(self, sets: Sequence[HeadTuple], rounds: Sequence[tuple[int, int]]) -> dict[int, Trained]:
        """Train sets in rounds. The sets with the larger mean log-probability enter the next round.

        Args:
            sets: heads that are spliced together. Of equal ones, the first stays.
            rounds: number of sets and their steps by the end of the round, for each round.

        Returns:
            The last state of every set, the best first, by its index.
        """
        states: dict[int, Trained] = {}
        order = list(range(len(sets)))
        for count, steps in rounds:
            alive, dropped = order[:count], order[count:]
            for index in dropped:  # only the scores are needed
                states[index] = replace(states[index], parameters=[], optimizer={})
            for index in alive:
                states[index] = self.train(sets[index], steps, states.get(index))
            order = sorted(alive, key=lambda index: -float(states[index].answers.mean())) + dropped
        return {index: states[index] for index in order}


def try_candidates(candidates: Candidates) -> TrainedScores:
    """Choose heads by successive halving, alone or (the option `greedy`) together with those chosen before."""
    trials, heads = Trials(candidates), candidates.heads
    base = trials.prompts.log_probabilities(candidates.model)
    trials.passes += candidates.held_out
    keep = min(candidates.splice.num_heads, len(heads))
    first, *further = trials.budget.stages(len(heads), keep)
    states = trials.halve([(head,) for head in heads], first)
    steps: dict[HeadId, NDArray[Any]] = {}
    gains: dict[HeadId, NDArray[Any]] = {}
    for index, state in states.items():
        steps[heads[index].head] = constant(state.steps, candidates.held_out)
        gains[heads[index].head] = state.answers - base
    chosen: list[ScoredHead] = []
    gains_given: dict[HeadId, NDArray[Any]] = {}
    if further:
        best = next(iter(states))
        chosen, so_far = [heads[best]], states[best].answers
        for rounds in further:
            left = [head for head in heads if head.head not in {s.head for s in chosen}]
            states = trials.halve([(*chosen, head) for head in left], rounds)
            best = next(iter(states))
            gains_given[left[best].head] = states[best].answers - so_far
            chosen.append(replace(left[best], given=tuple(s.head for s in chosen)))
            so_far = states[best].answers
    columns = {"trial_steps": steps, "trial": gains, "trial_given": gains_given}
    return TrainedScores(columns, trials.passes, trials.steps, tuple(chosen))
