"""Signs of effects, and intervals over the prompts that each item has."""

from __future__ import annotations

import numpy as np
import pytest

from surgery.locate.scores import Record, Table, intervals, scores_of
from surgery.stats import bootstrap_mean


def record(margins: list[float]) -> Record:
    one = [1.0] * len(margins)
    column = np.array([[[m - 1.0 for m in margins], one, one], [[np.nan] * len(margins)] * 3])
    clean = np.array([margins, [float(m > 0) for m in margins], one])
    return Record(clean, {"query": column, "segment_end": column}, {"attribution": column[:, 0]})


def test_losses_and_gains_have_their_signs() -> None:
    scores = scores_of(Table([record([1.0, -2.0]), record([3.0])]), 0)
    assert scores["query"][0].value == 1.0 and scores["segment_end"][0].value == -1.0
    assert scores["query_accuracy"][0].value == pytest.approx(-1 / 3)
    assert scores["attribution"][0].value == pytest.approx(-1 / 3)


def test_items_without_an_estimate_have_an_interval_of_no_prompts() -> None:
    values = np.random.default_rng(0).normal(size=(3, 20))
    values[1] = np.nan
    first, none, last = intervals(values, 5)
    assert [first, last] == bootstrap_mean(values[[0, 2]], 5) and none.n == 0
