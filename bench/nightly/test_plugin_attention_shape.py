"""Scores of hand-made rows: a perfect reader, one by chance, one that reads nothing, a sharp and a smooth one."""

from __future__ import annotations

import numpy as np
import pytest

from bench.plugins.hidden_attention import aggregate_score, effective_tokens, entropy, gather_score, sharpness

T = 20
SEGMENTS = [(3, 7), (7, 11), (11, 15)]  # the prompt has a header before, and a question behind


def on(*positions: int, length: int = T) -> np.ndarray:
    """A row that reads these tokens alike."""
    row = np.zeros(length)
    row[list(positions)] = 1 / len(positions)
    return row


def ends(*rows: np.ndarray) -> np.ndarray:
    return np.stack(rows)


@pytest.mark.parametrize("gold", [0, 1, 2])
class TestAggregate:
    def test_perfect_reader_is_one(self, gold: int) -> None:
        start, stop = SEGMENTS[gold]
        for position in range(start, stop):
            assert aggregate_score(on(position), SEGMENTS, gold) == pytest.approx(1)

    def test_uniform_is_zero(self, gold: int) -> None:
        assert aggregate_score(on(*range(T)), SEGMENTS, gold) == pytest.approx(0)

    def test_what_lies_outside_the_segments_does_not_count(self, gold: int) -> None:
        position = SEGMENTS[gold][1] - 1
        row = 0.01 * on(position) + 0.99 * on(0, T - 1)
        assert aggregate_score(row, SEGMENTS, gold) == pytest.approx(1)
        assert aggregate_score(on(0, T - 1), SEGMENTS, gold) == 0, "nothing is read of any segment"

    def test_another_segment_is_below_chance(self, gold: int) -> None:
        other = SEGMENTS[(gold + 1) % 3][0]
        assert aggregate_score(on(other), SEGMENTS, gold) == pytest.approx(-1 / 2)

    def test_rises_with_the_gold_share(self, gold: int) -> None:
        found = [
            float(aggregate_score(a * on(SEGMENTS[gold][0]) + (1 - a) * on(*range(T)), SEGMENTS, gold))
            for a in (0, 0.2, 0.5, 0.9, 1)
        ]
        assert found == sorted(found) and len(set(found)) == 5


def test_aggregate_of_many_heads_is_that_of_each() -> None:
    rows = np.random.default_rng(0).dirichlet(np.full(T, 0.3), size=(2, 3))
    found = aggregate_score(rows, SEGMENTS, 1)
    assert found.shape == (2, 3)
    for place in np.ndindex(2, 3):
        assert found[place] == pytest.approx(float(aggregate_score(rows[place], SEGMENTS, 1)))


class TestGather:
    uniform = ends(*(on(*range(stop)) for _, stop in SEGMENTS))
    perfect = ends(*(on(start) for start, _ in SEGMENTS))

    def test_perfect_reader_over_a_decay_that_brings_nothing_is_one(self) -> None:
        nothing = ends(on(0), on(0), on(0))
        assert gather_score(self.perfect, nothing, SEGMENTS) == pytest.approx(1)

    def test_what_the_decay_alone_does_is_deducted(self) -> None:
        """A head that forgets fast keeps every row on its segment, and gathers nothing by that."""
        fast = ends(*(on(stop - 2, stop - 1) for _, stop in SEGMENTS))
        assert gather_score(fast, fast, SEGMENTS) == 0
        own = [(stop - start) / stop for start, stop in SEGMENTS]
        assert gather_score(self.perfect, self.uniform, SEGMENTS) == pytest.approx(1 - np.mean(own))

    def test_reading_the_segment_before_is_negative(self) -> None:
        before = ends(on(0), on(3), on(7))
        assert gather_score(before, self.uniform, SEGMENTS) < -0.2


@pytest.mark.parametrize("length", [2, 7, 100])
class TestSmoothness:
    def test_uniform(self, length: int) -> None:
        row = on(*range(length), length=length)
        assert entropy(row) == pytest.approx(1) and sharpness(row) == 0
        assert effective_tokens(row) == pytest.approx(length)

    def test_one_token(self, length: int) -> None:
        row = on(length // 2, length=length)
        assert entropy(row) == 0 and effective_tokens(row) == 1 and sharpness(row) == 1

    def test_effective_tokens_counts_them(self, length: int) -> None:
        assert effective_tokens(on(0, length - 1, length=length)) == pytest.approx(2)
