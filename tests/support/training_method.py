"""A locating method that is declared to train candidates, and does not train: for tests of what is around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from pydantic import Field

from surgery.locate.methods import Candidates, TrainedScores
from surgery.recipe.methods import METHODS, RANKINGS, Column, Training, register_method
from surgery.recipe.section import Positive

NAME = "tried"


class Tries(Training):
    """Options of the method."""

    candidates: Positive = Field(3, description="Heads that are tried.")
    steps: Positive = Field(2, description="Steps of all of them.")

    def num_steps(self, candidates: int, keep: int) -> int:
        return self.steps


@contextmanager
def training_method(choose_together: int = 0) -> Iterator[list[Candidates]]:
    """Register the method `tried` inside. Its scores rise along the candidates: the last one is the best.

    Args:
        choose_together: number of candidates that it chooses itself, from the first.

    Yields:
        What it was called with.
    """
    calls: list[Candidates] = []

    def measure(candidates: Candidates) -> TrainedScores:
        calls.append(candidates)
        options = candidates.section.options_of(NAME)
        for _ in range(options.steps):
            candidates.tick()
        scores = {s.head: np.full(candidates.held_out, float(i)) for i, s in enumerate(candidates.heads)}
        return TrainedScores({NAME: scores}, 5.0, options.steps, candidates.heads[:choose_together])

    column = Column(NAME, "its place among the candidates", unit="place")
    register_method(NAME, [column], ranks=True, trains=True, options=Tries)(measure)
    try:
        yield calls
    finally:
        del METHODS._entries[NAME], RANKINGS._entries[NAME]
