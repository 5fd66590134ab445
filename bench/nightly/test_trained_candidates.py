"""Locating methods that train candidates choose a planted head. A branch copies the decoy's rows as the head's."""

from __future__ import annotations

import pytest

from surgery.locate.locating import locate_heads
from surgery.recipe import Locate, Splice
from tests.support.planted import plant, planted_tokenizer

BUDGET = {
    "pairs": 12,
    "examples": 32,
    "gates": {"steps": 24, "rows": 8, "candidates": 4},
    "trial": {"steps": 16, "rows": 8, "candidates": 3},
}


@pytest.mark.parametrize(("method", "seed", "n_groups"), [("gates", 4, 4), ("trial", 0, 1)])
def test_the_aggregate_head_is_chosen(method: str, seed: int, n_groups: int) -> None:
    planted = plant(seed, n_groups=n_groups, train=True, decoy=False)
    section = Locate.model_validate({**BUDGET, "methods": (method,)})
    splice = Splice(select=method)
    heads = locate_heads(planted.model, planted_tokenizer(train=True), section, splice, any_accuracy=True)
    assert heads.chosen[0].head == planted.aggregate and heads.chosen[0].scores[method].low > 0
