"""Nothing is called where there is nothing, and what is found is found again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.studies.null import allowed, calls, shuffled_labels
from bench.studies.stability import Effects, agreement, halves, measure, probe_seeds
from surgery.locate import scores
from surgery.types import HeadId
from tests.support.planted import answers, plant, planted_tokenizer

SEEDS = 10


class TestNull:
    @pytest.mark.parametrize("kind", ["random", "shuffled"])
    def test_family_wise_error(self, kind: str) -> None:
        called = [seed for seed in range(SEEDS) if calls(kind, seed, examples=32)]
        assert len(called) <= allowed(SEEDS)

    def test_family_wise_error_where_every_head_changes_answers(self) -> None:
        called = [seed for seed in range(100) if calls("redrawn", seed, examples=150)]
        assert len(called) <= allowed(100)

    def test_needs_the_correction(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scores, "holm", lambda p_values, level=0.05: [p <= level for p in p_values])
        assert sum(bool(calls("redrawn", seed, examples=150)) for seed in range(20)) > allowed(20)

    def test_shuffled_labels_are_at_chance(self) -> None:
        right = torch.cat([answers(*shuffled_labels(seed, 48)).correct for seed in range(SEEDS)])
        assert abs(float(right.double().mean()) - 0.2) < 0.06  # 480 prompts


def made_up(noise: float, heads: int = 16, prompts: int = 64, seed: int = 0) -> Effects:
    """(1,H,N): head h is worth h, give or take."""
    rng = np.random.default_rng(seed)
    return np.arange(heads, dtype=float)[None, :, None] + noise * rng.normal(size=(1, heads, prompts))


class TestStability:
    def test_same_effects_agree(self) -> None:
        found = agreement(made_up(0.1), made_up(0.1, seed=1))
        assert found["rank"] == pytest.approx(1)
        assert found["top 1"] == found["top 10"] == 1
        assert found["candidates"] >= 15

    def test_sides_share_no_prompt(self) -> None:
        numbered = [1000 * s + np.arange(64, dtype=float)[None, None] for s in range(3)]
        for pairs in (halves(numbered, 32), probe_seeds(numbered, 64)):
            sides = [(set(one.ravel()), set(other.ravel())) for one, other in pairs]
            assert sides and not any(one & other for one, other in sides)

    def test_measures_what_locating_measures(self) -> None:
        planted = plant(1)
        found = measure(planted.model, planted_tokenizer(), seed=1, examples=8, pairs=5, size=4)
        assert {name: x.shape for name, x in found.items()} == {"ablation": (1, 16, 8), "sharpen": (2, 16, 8)}
        best = np.argsort(-found["ablation"][0].mean(-1))[:2]
        assert {HeadId(int(i) // 4, int(i) % 4) for i in best} == set(planted.heads)
        sharpened = found["sharpen"].mean(-1).max(0).argmax()
        assert HeadId(int(sharpened) // 4, int(sharpened) % 4) == planted.aggregate
