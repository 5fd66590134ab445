"""Successive elimination: keeps what may be among the best, at the stated risk, and drops the rest early."""

from __future__ import annotations

import numpy as np
import pytest

from surgery.locate import selection
from surgery.locate.locating import locate_heads
from surgery.locate.selection import search_rounds, survivors
from surgery.models.lookup import family_of
from surgery.recipe import Locate, Search, Splice
from tests.support.cases import each
from tests.support.pico import pico_base, pico_family, pico_tokenizer


def drawn(means: list[float], n: int, seed: int, spread: float = 1.0) -> np.ndarray:
    """(C,n) scores whose prompts have something in common, as those of one model do."""
    rng = np.random.default_rng(seed)
    return np.array(means)[:, None] + rng.normal(size=n) + spread * rng.normal(size=(len(means), n))


@each(
    ("first", "examples", "expected"),
    [(32, 1000, [32, 64, 128, 256, 512, 1000]), (32, 32, [32]), (32, 33, [32, 33]), (64, 20, [20])],
)
def test_rounds_double_and_end_at_all_prompts(first: int, examples: int, expected: list[int]) -> None:
    assert search_rounds(first, examples) == expected


def test_drops_what_is_clearly_worse_and_nothing_else() -> None:
    scores, unseen = drawn([5.0, 4.9, 0.0, 0.1, 0.0, 4.8], 64, 0), drawn([5.0, 0.0, 4.9, 0.0], 64, 4)
    worse, better = drawn([0.0, 0.0, 0.0], 64, 1), drawn([0.0, 5.0, 0.0], 64, 2)
    unseen[1, 32:] = np.nan  # prompts that a dropped head did not see are no hindrance
    for arms, alive, keep, expected in (
        ([scores], range(6), 1, [0, 1, 5]),
        ([scores], [1, 2, 4], 1, [1]),  # only among those that are left
        ([scores], range(6), 6, list(range(6))),
        ([worse, better], range(3), 1, [1]),  # a head counts by its better arm
        ([better, worse], range(3), 1, [1]),
        ([unseen], [0, 2, 3], 1, [0, 2]),
    ):
        assert survivors(arms, alive, keep, 0.05, 3) == expected
    assert {0, 1, 5} <= set(survivors([scores], range(6), 4, 0.05, 3)), "the best four are kept, whoever is fourth"


def test_the_risk_is_kept() -> None:
    """Four rounds over heads of which the best is best by very little: it is lost in at most 5% of 200 searches."""
    lost, steps = 0, search_rounds(16, 128)
    for seed in range(200):
        scores, alive = drawn([0.3, *[0.25] * 15], 128, seed), list(range(16))
        for count in steps[:-1]:
            seen = scores.copy()
            seen[:, count:] = np.nan
            alive = survivors([seen[:, :count]], alive, 1, 0.05, len(steps) - 1)
        lost += 0 not in alive
    assert lost <= 10


class TestLocateWithASearch:
    def test_what_cannot_be_spliced_does_not_push_out_what_can(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In a model with attention heads, each kind competes with its own."""
        asked: list[list[int]] = []

        def note(arms: list[np.ndarray], alive: list[int], *_: object) -> list[int]:
            asked.append(list(alive))
            return list(alive)

        monkeypatch.setattr(selection, "survivors", note)
        model = pico_family("bamba", vocab_size=1024)
        sites = {spec.name for spec in family_of(model.config).sites(model.config)}
        heads = [head for spec in family_of(model.config).mixers(model.config) for head in spec.heads]
        section = Locate(pairs=4, examples=4, batch_size=2, search=Search(first=2))
        locate_heads(model, pico_tokenizer(), section, Splice(select="ablation"), any_accuracy=True)
        kinds = [{heads[i].mixer in sites for i in places} for places in asked]
        assert kinds == [{True}, {False}] and sum(map(len, asked)) == len(heads)

    SECTION = Locate(pairs=4, examples=24, batch_size=4)

    def test_the_best_head_and_its_numbers_are_those_of_the_whole(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Heads are dropped by a rule of this test's: the survivors' numbers do not depend on it."""
        model, tokenizer = pico_base(vocab_size=1024, layers=2), pico_tokenizer()
        splice = Splice(select="ablation")
        whole = locate_heads(model, tokenizer, self.SECTION, splice, any_accuracy=True)
        kept: list[list[int]] = []

        def half(arms: list[np.ndarray], alive: list[int], keep: int, risk: float, num_rounds: int) -> list[int]:
            if not alive:
                return []
            assert num_rounds == 2 and all(arm.shape == (8, (8, 16)[len(kept)]) for arm in arms)
            kept.append(sorted(alive, key=lambda i: -np.nanmean(arms[0][i]))[: len(alive) // 2])
            return sorted(kept[-1])

        monkeypatch.setattr(selection, "survivors", half)
        section = self.SECTION.model_copy(update={"search": Search(first=8)})
        found = locate_heads(model, tokenizer, section, splice, any_accuracy=True)
        full, counts = {s.head: s for s in whole.heads}, sorted(s.n for s in found.heads)
        assert [len(k) for k in kept] == [4, 2] and counts == [8] * 4 + [16] * 2 + [24] * 2
        assert [s.n for s in found.heads] == sorted(counts, reverse=True), "those that were dropped come last"
        for scored in found.heads:
            assert (scored.role == "unmeasured") == (scored.n < 24)
            if scored.n == 24:
                for column, interval in scored.scores.items():
                    assert interval.value == pytest.approx(full[scored.head].scores[column].value, abs=1e-4)
        assert found.cost["passes"] < whole.cost["passes"] and found.cost["prompts"] == 24
        assert found.clean == whole.clean
