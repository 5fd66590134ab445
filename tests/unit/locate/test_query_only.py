"""Methods of one decode step alone: the same numbers, fewer of them, and no claim about what was not measured."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from surgery.locate.locating import locate_heads
from surgery.recipe import Locate, Splice
from surgery.recipe.methods import all_columns
from surgery.types import Interval
from tests.support.pico import pico_family, pico_tokenizer

CONTEXT = {"ablation", "context"}
EFFECTS = {column.name for column in all_columns().values() if column.effect}


def agree(one: Interval, other: Interval) -> bool:
    """But for rounding: at the query alone the clean model takes it as a decode step too."""
    return asdict(one) == pytest.approx(asdict(other), abs=1e-4)


@pytest.mark.parametrize("name", ["mamba2", "bamba"])
def test_columns_at_the_query_are_the_same(name: str) -> None:
    model, tokenizer = pico_family(name, vocab_size=976), pico_tokenizer()
    section, splice = Locate(pairs=4, examples=4, batch_size=4), Splice(select="random")
    whole = locate_heads(model, tokenizer, section, splice)
    query = locate_heads(
        model, tokenizer, section.model_copy(update={"methods": ("query", "patching", "sharpen")}), splice
    )
    for full, part in zip(whole.heads, query.heads, strict=True):
        assert full.head == part.head
        assert {c for c in full.scores if c in EFFECTS} - {c for c in part.scores if c in EFFECTS} == CONTEXT
        assert all(agree(full.scores[column], part.scores[column]) for column in part.scores)
    assert {head.role for head in query.heads} <= {"aggregate", "neither"}
    assert [head.head for head in query.chosen] == [head.head for head in whole.chosen]


def test_only_heads_that_can_be_spliced_are_chosen() -> None:
    tokenizer, section = pico_tokenizer(), Locate(pairs=4, examples=4, batch_size=4)
    for seed in range(5):
        found = locate_heads(pico_family("bamba", vocab_size=976), tokenizer, section, Splice(select="random"), seed)
        assert {head.head.letter for head in found.chosen} == {"H"}
    assert locate_heads(pico_family("llama", vocab_size=976), tokenizer, section, Splice(select="random")).chosen == ()
