"""Methods that train candidates: which heads they get, what becomes of their scores, and their options in a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from surgery.errors import PlanError, RecipeError
from surgery.locate.locating import locate_heads
from surgery.locate.methods import Candidates
from surgery.locate.selection import can_choose_again, rank
from surgery.recipe import Locate, Recipe, Search, Splice
from surgery.types import HeadId, HeadSet, Interval, ScoredHead
from tests.support.pico import pico_base, pico_family, pico_tokenizer
from tests.support.training_method import NAME, Tries, training_method

PROMPTS = {"pairs": 4, "examples": 6, "batch_size": 3}


@pytest.fixture
def calls() -> Iterator[list[Candidates]]:
    with training_method() as made:
        yield made


def located(*methods: str, splice: dict[str, Any] | None = None, **section: Any) -> HeadSet:
    whole = Locate(methods=(NAME, *methods), **{**PROMPTS, **section})
    chosen, model = Splice(select=NAME, **(splice or {})), pico_base(vocab_size=1024, layers=2)
    return locate_heads(model, pico_tokenizer(), whole, chosen, any_accuracy=True)


def test_the_best_by_the_oracle_read_are_tried_and_rank_first(calls: list[Candidates]) -> None:
    heads = located(splice={"num_heads": 2})
    oracle = [s.head for s in rank(heads.heads, "sharpen")]
    tried = [s.head for s in calls[0].heads]
    assert tried == oracle[:3] and calls[0].held_out == 6
    assert [s.head for s in heads.heads] == [*tried[::-1], *oracle[3:]] and heads.chosen == heads.heads[:2]
    assert heads.heads[0].scores[NAME] == Interval(2.0, 2.0, 2.0, 6) and NAME not in heads.heads[-1].scores
    assert heads.cost[f"{NAME}_passes"] == 5.0 and heads.cost[f"{NAME}_steps"] == 2.0


def test_heads_that_it_chooses_together_are_taken_with_their_scores() -> None:
    with training_method(choose_together=2) as calls:
        heads = located(splice={"num_heads": 2})
    assert [s.head for s in heads.chosen] == [s.head for s in calls[0].heads[:2]]
    assert all({NAME, "segment_end"} <= s.scores.keys() for s in heads.chosen)


@pytest.mark.parametrize("search", [None, Search(first=3)])
def test_another_ranking_chooses_the_candidates(calls: list[Candidates], search: Search | None) -> None:
    options = {NAME: {"candidates": 2, "candidates_by": "aggregate"}}
    heads = located("query", method_options=options, search=search)
    assert [s.head for s in calls[0].heads] == [s.head for s in rank(heads.heads, "aggregate")[:2]]


def test_untried_heads_come_last(calls: list[Candidates]) -> None:
    def scored(name: str, **scores: float) -> ScoredHead:
        intervals = {key: Interval(value, value, value, 6) for key, value in scores.items()}
        return ScoredHead(HeadId.parse(name), "neither", "segment_end", intervals)

    heads = [scored("L0H0", segment_end=9.0), scored("L0H1", segment_end=8.0), scored("L1H0", tried=-5.0)]
    assert [str(s.head) for s in rank(heads, NAME)] == ["L1H0", "L0H0", "L0H1"]


def test_progress_counts_its_steps(calls: list[Candidates]) -> None:
    steps: list[tuple[int, int]] = []
    section = Locate(methods=(NAME,), method_options={NAME: {"steps": 7}}, **PROMPTS)
    model, splice = pico_base(vocab_size=1024, layers=2), Splice(select=NAME)
    progress: Any = lambda *at: steps.append(at)  # noqa: E731
    locate_heads(model, pico_tokenizer(), section, splice, any_accuracy=True, progress=progress)
    assert steps[-1] == (2 * 2 + 7, 2 * 2 + 7), "two batches with both oracle reads, and its steps"


def test_what_it_cannot_do_is_refused(calls: list[Candidates]) -> None:
    with pytest.raises(
        PlanError, match=r"splice.num_heads: 4. Set locate.method_options.tried.candidates to 4 or more"
    ):
        located(splice={"num_heads": 4})
    llama, section = pico_family("llama", vocab_size=1024), Locate(methods=(NAME,), **PROMPTS)
    with pytest.raises(PlanError, match=r"locate.methods: tried. .* no head of this model can be spliced"):
        locate_heads(llama, pico_tokenizer(), section, Splice(select=NAME), any_accuracy=True)
    teacher = {"select": "sharpen", "init": "teacher", "teacher": {"model": "teacher"}}
    for splice, words, in_recipe in (
        (teacher, "It cannot train copies of a teacher", "tried cannot train copies of a teacher"),
        ({"select": "sharpen", "form": "block"}, "It does not train splice.form: block", "trains spliced heads"),
    ):
        whole = {"name": "x", "base": {"model": "base"}, "splice": splice, "locate": {"methods": [NAME]}}
        train = {"sources": [{"task": "kv_retrieval", "pairs": [4, 8], "rows": 4, "weights": {"answer": 1.0}}]}
        with pytest.raises(RecipeError, match=f"locate.methods: tried. {words}"):
            given = Splice.model_validate(splice)
            locate_heads(pico_base(vocab_size=1024), pico_tokenizer(), section, given, any_accuracy=True)
        with pytest.raises(ValueError, match=in_recipe):
            Recipe.model_validate({**whole, **({"train": train} if "teacher" in splice else {})})


def test_options_are_checked_when_the_recipe_is_read(calls: list[Candidates]) -> None:
    for options, words in (
        ({NAME: {"steps": 0}}, "tried.steps: Input should be greater than 0. Keys: candidates, candidates_by, steps."),
        ({NAME: {"stops": 1}}, "tried.stops: Extra inputs are not permitted. Keys: candidates, "),
        ({NAME: {"candidates_by": NAME}}, "tried.candidates_by: Unknown way to select heads."),
        ({NAME: {"candidates_by": "aggregate"}}, "`tried.candidates_by: aggregate` needs `query` in `methods`"),
        ({"sharpen": {}}, "The method sharpen has no options"),
        ({"gates": {}}, "The method gates has no options"),
    ):
        with pytest.raises(ValidationError, match=re.escape(words)):
            Locate(methods=(NAME,), method_options=options)
    with pytest.raises(ValidationError, match="`method_options` has options of tried: add it to `methods`"):
        Locate(methods=("sharpen",), method_options={NAME: {}})
    section = Locate(methods=(NAME,), method_options={NAME: {"steps": 3}})
    assert section.methods == (NAME, "sharpen")
    assert section.options_of(NAME) == Tries(steps=3) and section.options_of("sharpen") is None
    assert Locate.model_validate(section.model_dump(mode="json")) == section


def test_another_number_of_heads_is_another_measurement(calls: list[Candidates]) -> None:
    section = Locate(methods=(NAME,))
    one, two = (Splice(select=NAME, num_heads=k) for k in (1, 2))
    assert can_choose_again(two, two, section) and not can_choose_again(one, two, section)
