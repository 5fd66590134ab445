"""Learning rates by the size of the base."""

from __future__ import annotations

from itertools import pairwise

from surgery.recipe import Train, check_recipe
from surgery.recipe.optimizer import RATES, rates
from tests.support.cases import each


@each(("size", "base", "heads"), RATES)
def test_rates_are_those_of_the_recipes_at_their_sizes(size: int, base: float, heads: float) -> None:
    assert rates(size) == (base, heads)


def test_rates_fall_with_the_size_and_stay_within_those_of_the_recipes() -> None:
    values = [rates(10**n) for n in range(1, 13)]
    for smaller, larger in pairwise(values):
        assert smaller[0] >= larger[0] and smaller[1] >= larger[1]
    assert values[0] == RATES[0][1:] and values[-1] == RATES[-1][1:]
    middle, (low, high) = rates(10_000_000), (rates(130_000_000), rates(562_784))
    assert low[0] < middle[0] < high[0] and low[1] < middle[1] < high[1]


@each(("size", "base", "heads"), [(130_000_000, 2e-4, 2e-3), (2_700_000_000, 1e-4, 2e-3)])
def test_a_recipe_without_rates_gets_those_of_its_base(size: int, base: float, heads: float) -> None:
    train = check_recipe({"name": "mine", "base": {"model": "owner/model"}}).train
    found = train.at_size(size).optimizer
    assert (found.lr, found.new_heads_lr) == (base, heads)
    assert train.at_size(size).at_size(100) == train.at_size(size)


def test_every_stage_gets_rates() -> None:
    sources = [{"task": "sentence", "rows": 2, "weights": {"base_kl": 1.0}}]
    stages = [{"name": name, "sources": sources, "optimizer": {"lr": lr}} for name, lr in (("a", None), ("b", 0.5))]
    train = Train.model_validate({"stages": stages}).at_size(130_000_000)
    assert [(stage.optimizer.lr, stage.optimizer.new_heads_lr) for stage in train.sequence] == [
        (2e-4, 2e-3),
        (0.5, 2e-3),
    ]
