"""Ablation of heads given others: order, pairs, what they cost beyond their parts; on made-up losses and a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from bench.plugins.redundancy import ablate_in_turn, ablate_pairs, ablate_together, redundancy
from surgery.locate.batches import PromptBatches
from surgery.locate.locating import locate_heads
from surgery.recipe import Locate, Splice
from surgery.types import HeadId, Interval, ScoredHead, head_set_from_json, to_json
from tests.support.pico import pico_base, pico_tokenizer

A, B, C, D = (HeadId(layer, head) for layer in range(2) for head in range(2))


def margin(off: Sequence[HeadId]) -> float:
    """C and D stand in for one another; A costs 2 by itself; B does nothing."""
    return 10 - 2 * (A in off) - 6 * (C in off and D in off) - 1 * (C in off or D in off)


def without(sets: Sequence[Sequence[HeadId]]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Eight prompts: margins around the mean, and right answers where they are above 5."""

    def scores(off: Sequence[HeadId]) -> np.ndarray:
        margins = margin(off) + np.linspace(-1, 1, 8)
        return np.stack([margins, margins > 5])

    return scores(()), [scores(off) for off in sets]


def scored(head: HeadId, **columns: float) -> ScoredHead:
    scores = {"ablation": 10 - margin([head]), "query": 0.0, "context": 0.0, **columns}
    return ScoredHead(head, "neither", None, {k: Interval(v, v, v, 8) for k, v in scores.items()})


RANKED = [scored(A, context=2.0), scored(C, query=1.0), scored(D, query=0.9), scored(B)]


def test_each_is_the_worst_given_those_before() -> None:
    """A costs most alone; then C, and then D, whose loss alone said nothing of what it costs once C is gone."""
    found = ablate_in_turn(RANKED, 3, 4, without, 0)
    assert [g.heads for g in found] == [(A,), (A, C), (A, C, D)]
    assert [g.scores["ablation_given"].value for g in found] == pytest.approx([2, 1, 6])
    assert [g.scores["ablation"].value for g in found] == pytest.approx([2, 3, 9])
    assert [g.scores["alone"].value for g in found] == pytest.approx([2, 1, 1])
    assert found[-1].scores["ablation_given_accuracy"].value == 1.0


def test_only_the_first_are_candidates() -> None:
    found = ablate_in_turn(RANKED, 9, 2, without, 0)
    assert [g.heads[-1] for g in found] == [A, C]


def test_pairs_say_what_they_cost_beyond_their_parts() -> None:
    """The best two by context are A and, by name, B; the best two by query are C and D."""
    found = ablate_pairs(RANKED, 2, without, 0)
    by_heads = {g.heads: g.scores for g in found}
    assert set(by_heads) == {(A, C), (A, D), (B, C), (B, D)}
    assert all(s["interaction"].value == pytest.approx(0) for s in by_heads.values())
    swapped = [scored(C, context=2.0), scored(D, query=2.0)]
    (pair,) = ablate_pairs(swapped, 1, without, 0)
    assert pair.heads == (C, D) and pair.scores["interaction"].value == pytest.approx(5)
    assert pair.scores["alone"].value == pytest.approx(2) and pair.scores["ablation"].value == pytest.approx(7)


def test_one_head_makes_no_pair() -> None:
    assert ablate_pairs([scored(A, context=1.0, query=1.0)], 1, without, 0) == []


def test_all_together() -> None:
    group = ablate_together([A, C, D], without, 0)
    assert group.kind == "chosen" and group.scores["ablation"].value == pytest.approx(9)


def test_on_a_model_the_groups_are_what_removing_them_costs() -> None:
    section, splice = Locate(pairs=4, examples=6, batch_size=4), Splice(select="sharpen", num_heads=2)
    model = pico_base(vocab_size=1024, layers=2)
    heads = locate_heads(model, pico_tokenizer(), section, splice, any_accuracy=True)
    groups = redundancy(PromptBatches(model, pico_tokenizer(), section, 0), heads, backups=2)
    kinds = [group.kind for group in groups]
    assert kinds[:2] == ["backup", "backup"] and kinds[-1] == "chosen" and "pair" in kinds
    best = max(heads.heads, key=lambda s: s.scores["ablation"].value)
    assert groups[0].heads == (best.head,)
    assert groups[0].scores["ablation"].value == pytest.approx(best.scores["ablation"].value, abs=1e-4)
    whole = replace(heads, groups=tuple(groups))
    assert head_set_from_json(to_json(whole)) == whole
