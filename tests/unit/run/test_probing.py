"""The search for a format and a number of pairs, on accuracies that are known."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from surgery.errors import ProbeError, SurgeryError
from surgery.run import measuring
from surgery.run.measuring import try_batch_sizes
from surgery.run.probing import ADJACENT, EASY, FAR, HARD, Format, Prober, Screening, Share, find_pairs, screen
from tests.support.pico import pico_base, pico_tokenizer

Curve = Callable[[int], float]
OTHER = Format("phonebook")


def falling(half: float) -> Curve:
    """An accuracy that falls smoothly, and is about .5 at `half` pairs."""
    return lambda pairs: 1 / (1 + (pairs / half) ** 3)


def cliff(last: int) -> Curve:
    """Everything right up to `last` pairs, then hardly anything."""
    return lambda pairs: 1.0 if pairs <= last else 0.1


def test_a_falling_accuracy_is_met_in_the_middle() -> None:
    for half in (4, 6, 9, 13, 20, 33, 50, 90):
        accuracy = falling(half)
        pairs, measured = find_pairs(accuracy)
        assert HARD <= accuracy(pairs) <= EASY and len(measured) <= 8, half
        assert measured == {n: accuracy(n) for n in measured}
    for last in (3, 5, 11, 40, 77):  # a cliff is bisected
        pairs, measured = find_pairs(cliff(last))
        easy, hard = max(n for n in measured if n <= last), min(n for n in measured if n > last)
        assert pairs == easy and hard <= 1.5 * easy + 1, last


def test_a_base_that_always_or_hardly_answers_gets_the_most_or_the_fewest_pairs() -> None:
    assert find_pairs(lambda pairs: 1.0)[0] == 100
    assert find_pairs(lambda pairs: 1.0, most=37)[0] == 37
    assert find_pairs(lambda pairs: 0.9 / pairs)[0] == 2


def test_numbers_that_cannot_be_measured_are_avoided() -> None:
    for limit in (3, 6, 20, 50, 0):

        def accuracy(pairs: int, limit: int = limit) -> float:
            if pairs > limit:
                raise ProbeError("pairs", pairs, "Longer than the context.")
            return 1.0

        if limit == 0:
            with pytest.raises(ProbeError):
                find_pairs(accuracy)
            continue
        pairs, measured = find_pairs(accuracy)
        assert limit / 1.5 <= pairs <= limit and max(measured) <= limit


def test_the_preferred_format_among_the_best_is_chosen() -> None:
    for right, best in (
        ((60, 62, 64), FAR),
        ((50, 60, 62), ADJACENT),
        ((10, 40, 60), OTHER),
        ((8, 8, 8), None),
        ((8, 30, 8), ADJACENT),
    ):
        shares = {form: Share(n, 64, 1 / 8) for form, n in zip((FAR, ADJACENT, OTHER), right, strict=True)}
        assert Screening(shares, 8, {}).best == best, right
    assert not Share(13, 64, 1 / 8).above_chance and Share(20, 64, 1 / 8).above_chance  # 8 are right by chance


def test_a_random_model_is_tried_with_fewer_pairs_and_found_at_chance() -> None:
    said: list[str] = []
    model = pico_base(vocab_size=1024, layers=1)
    result = screen(Prober(model, pico_tokenizer(), 16, said.append), 16, (ADJACENT,))
    assert result.best is None and result.pairs == 3 and len(said) == 2
    result = screen(Prober(model, pico_tokenizer(), 16, lambda line: None, context=10), 4, (ADJACENT,))
    assert result.shares == {} and "context of 10" in result.unusable[ADJACENT]


def test_a_format_that_is_answered_with_few_pairs_alone_is_located_with_them() -> None:
    right = {8: 0.15, 4: 0.45, 3: 0.55, 2: 0.7}

    def share(form: Format, pairs: int, count: int) -> Share:
        made = prober.shares[form, pairs] = Share(round(right[pairs] * count), count, 1 / pairs)
        return made

    prober: Any = SimpleNamespace(shares={}, share=share)
    screening = Screening({ADJACENT: share(ADJACENT, 3, 64)}, 3, {})
    form, pairs, found, ladder = measuring._place(prober, screening, 32)
    assert (form, pairs, found) == (ADJACENT, 3, Share(35, 64, 1 / 3)) and set(ladder) == set(right)


def test_the_batch_grows_while_that_is_faster_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that a batch of n prompts moves by n / `saturates`, and a memory that grows by a unit for each prompt."""
    clock = {"now": 0.0, "peak": 0.0}
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: clock["now"])
    monkeypatch.setattr(measuring, "peak_bytes", lambda _: clock["peak"])

    def attempt(saturates: int, fails: int = 1000, room: int = 10**6) -> tuple[int, list[int]]:
        tried: list[int] = []
        clock["peak"] = 0.0

        def run(size: int) -> None:
            if size >= fails:
                raise MemoryError
            tried.append(size)
            clock["now"] += max(1.0, size / saturates)
            clock["peak"] = max(clock["peak"], size)

        return try_batch_sizes(run, torch.device("cpu"), room)[0], tried

    for saturates in (4, 8, 16, 64):
        assert attempt(saturates)[0] == saturates
    assert attempt(64, fails=16) == (8, [1, 4, 8])
    assert attempt(64, room=20) == (16, [1, 4, 8, 16])
    with pytest.raises(SurgeryError, match="Not even 4"):
        attempt(64, fails=4)

    def bug(size: int) -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        try_batch_sizes(bug, torch.device("cpu"), 1)
