"""The sentence and the four numbers at the top of a report: they follow from results.json, whatever it says."""

from __future__ import annotations

from typing import Any

import pytest

from surgery.recipe import Evaluate, Recipe, check_recipe
from surgery.report.verdict import main_place, tiles_of, verdict_of
from tests.support.reports import spliced

RECIPE = spliced("owner/base")


def share(value: float, half: float = 0.03) -> dict[str, float]:
    return {
        "accuracy": value,
        "low": max(0.0, value - half) if value else 0.0,
        "high": min(1.0, value + half),
        "n": 200,
    }


def arm(kv: float, facts: float = 0.9, perplexity: float = 2.4, **more: Any) -> dict[str, Any]:
    sizes = {"8": share(kv), "64": share(kv / 2)}
    return {"kv_retrieval": sizes, "closed_book": share(facts), "perplexity": perplexity, **more}


def test(difference: float, significant: bool) -> dict[str, Any]:
    ends = {"low": difference - 0.05, "high": difference + 0.05}
    return {"difference": difference, **ends, "p_two_sided": 0.01, "significant": significant}


test.__test__ = False  # type: ignore[attr-defined]


def results(hybrid: dict, control: dict | None, before: dict, /, **comparisons: Any) -> dict[str, Any]:
    arms = {"base": before, **({"no_splice": control} if control else {}), "hybrid": hybrid}
    return {"arms": arms, **({"comparisons": {"hybrid": comparisons}} if comparisons else {})}


def tuned(control: bool = True) -> Recipe:
    source = {"data": {"path": "rows.jsonl", "columns": {"answer_span": "auto"}, "holdout": 0.1}, "rows": 2}
    train = {"steps": 5, "sources": [{**source, "weights": {"answer": 1}}]}
    recipe = {"name": "f", "base": {"model": "m"}, "splice": None, "train": train}
    return check_recipe(recipe | ({"control": {"model": "b"}} if control else {}))


@pytest.mark.parametrize(
    ("difference", "significant", "tone", "words"),
    [
        (0.5, True, "better", "The hybrid is better than the control: KV-retrieval, 8 pairs, 90.0% against 40.0%"),
        (0.5, False, "unclear", "The hybrid is not significantly better than the control"),
        (-0.5, True, "worse", "The hybrid is worse than the control"),
        (-0.5, False, "unclear", "The hybrid is not significantly better than the control"),
    ],
)
def test_the_test_decides(difference: float, significant: bool, tone: str, words: str) -> None:
    tests = {"kv_retrieval/8": test(difference, significant)}
    verdict = verdict_of(results(arm(0.9), arm(0.4), arm(0.3), no_splice=tests), RECIPE)
    assert verdict.tone == tone and verdict.sentence.startswith(words)
    assert f"({100 * difference:+.1f} points [" in verdict.sentence and "p 0.01)" in verdict.sentence


@pytest.mark.parametrize(("control", "tone"), [(0.4, "better"), (0.86, "unclear"), (0.98, "worse")])
def test_without_tests_intervals_must_not_overlap(control: float, tone: str) -> None:
    verdict = verdict_of(results(arm(0.9), arm(control), arm(0.3)), RECIPE)
    assert verdict.tone == tone and "by 95% intervals" in verdict.sentence


def test_facts_that_fell_are_named_and_others_are_given() -> None:
    falls = {"closed_book": test(-0.3, True), "kv_retrieval/64": test(-0.2, True), "kv_retrieval/8": test(0.5, True)}
    given = results(arm(0.6, facts=0.6), arm(0.1), arm(0.9), base=falls, no_splice={"kv_retrieval/8": test(0.5, True)})
    sentence = verdict_of(given, RECIPE).sentence
    assert "closed-book facts, held-out half fell from 90.0% to 60.0%" in sentence
    assert "KV-retrieval, 64 pairs fell from 45.0% to 30.0%" in sentence
    kept = verdict_of(results(arm(0.9, facts=0.89), arm(0.4), arm(0.3)), RECIPE).sentence
    assert "closed-book facts, held-out half: 89.0% (base 90.0%)" in kept and "fell" not in kept


def test_a_risen_perplexity_is_named() -> None:
    for value, named in ((2.41, False), (2.6, True)):
        sentence = verdict_of(results(arm(0.9, perplexity=value), arm(0.4), arm(0.3)), RECIPE).sentence
        assert ("perplexity of held-out sentences rose from 2.400 to 2.600" in sentence) == named


def test_better_than_the_control_alone_is_not_hidden() -> None:
    """The control may have become worse in training."""
    sentence = verdict_of(results(arm(0.9), arm(0.4), arm(0.89)), RECIPE).sentence
    assert sentence.startswith("The hybrid is better than the control")
    assert "it is not significantly better than the base (89.0%)" in sentence


def test_without_a_control_training_may_be_the_reason() -> None:
    sentence = verdict_of(results(arm(0.9), None, arm(0.4)), RECIPE).sentence
    assert sentence.startswith("The hybrid is better than the base") and "no control was trained" in sentence


def test_models_at_chance_are_not_compared() -> None:
    """1 of 8 is chance, even if the hybrid is significantly better."""
    given = results(arm(0.14), arm(0.11), arm(0.12), no_splice={"kv_retrieval/8": test(0.03, True)})
    verdict = verdict_of(given, RECIPE)
    assert verdict.tone == "unclear"
    assert verdict.sentence.startswith("All models are at chance: KV-retrieval, 8 pairs, at most 14.0% (chance 12.5%)")


def test_the_users_data_comes_first() -> None:
    own = {"rows.jsonl": {**share(0.8), "first_token": share(0.9), "loss": {"nats": 0.5, "tokens": 9}}}
    none = {"rows.jsonl": {**share(0.0), "first_token": share(0.1), "loss": {"nats": 5.0, "tokens": 9}}}
    given = results(arm(0.9, held_out=own), arm(0.9, held_out=none), arm(0.9, held_out=none))
    recipe = tuned()
    assert main_place(given["arms"], recipe) == ("held_out", "rows.jsonl")
    sentence = verdict_of(given, recipe).sentence
    assert "better than the control: rows.jsonl, held-out rows, exact match, 80.0% against 0.0%" in sentence
    assert "(before fine-tuning 90.0%)" in sentence
    tiles = tiles_of(given, recipe)
    assert tiles[0].value == "80.0%" and tiles[0].note == "control 0.0%, before fine-tuning 0.0%"
    given["arms"]["hybrid"]["held_out"] = none
    sentence = verdict_of(given, recipe).sentence
    assert sentence.startswith("No model is right on any of the 200 held-out rows: rows.jsonl")
    del given["arms"]["no_splice"]
    given["arms"]["hybrid"]["held_out"] = own
    assert verdict_of(given, tuned(control=False)).sentence.startswith("The hybrid is better than before fine-tuning")


def test_four_tiles_always() -> None:
    tiles = tiles_of(results(arm(0.9), arm(0.4), arm(0.3)), RECIPE)
    assert [tile.label for tile in tiles] == [
        "KV-retrieval, 8 pairs", "KV-retrieval, 64 pairs, beyond training", "closed-book facts, held-out half",
        "perplexity, held-out",
    ]  # fmt: skip
    assert [tile.value for tile in tiles] == ["90.0%", "45.0%", "90.0%", "2.400"]
    sizes = {"parameters": 1000, "new_parameters": 50, "state_bytes": 8, "kv_bytes_per_token": 1024}
    with_sizes = tiles_of({**results(arm(0.9), arm(0.4), arm(0.3)), "sizes": {"hybrid": sizes}}, RECIPE)
    assert (with_sizes[3].value, with_sizes[3].note) == ("1,024 B", "50 new weights (5%)")
    few = {"kv_retrieval": {}, "phonebook": {"8": share(0.5)}, "adjacent_pairs": {"8": share(0.6)}}
    others = tiles_of({**results(few, None, few), "seconds": {"train": 90.0}}, RECIPE)
    assert [tile.value for tile in others] == ["50.0%", "60.0%", "7 steps"] and others[2].note == "90 s"


def test_no_accuracy_is_no_verdict() -> None:
    nothing = {"kv_retrieval": {}, "perplexity": 2.0}
    verdict = verdict_of(results(nothing, None, nothing), RECIPE)
    assert verdict.tone == "unclear" and "nothing can be said" in verdict.sentence
    assert len(tiles_of(results(nothing, None, nothing), RECIPE)) == 2


def test_a_task_with_a_name_is_judged_as_the_task_that_it_is() -> None:
    tasks = [{"task": "closed_book", "name": "facts"}, {"task": "kv_retrieval", "pairs": [16], "name": "far"}]
    recipe = RECIPE.model_copy(update={"evaluate": Evaluate.model_validate({"tasks": tasks})})
    arms = {
        name: {"facts": share(facts), "far": {"16": share(0.06)}} for name, facts in (("base", 0.6), ("hybrid", 0.55))
    }
    found = verdict_of({"arms": arms}, recipe).sentence
    assert main_place(arms, recipe) == ("far", "16")
    assert found.startswith("All models are at chance: far, 16, at most 6.0% (chance 6.2%)")
    assert "facts: 55.0% (base 60.0%)" in found
    assert "facts" in [tile.label for tile in tiles_of({"arms": arms}, recipe)]
