"""The sentence and the four numbers at the top of a report: they follow from results.json, whatever it says."""

from __future__ import annotations

from typing import Any

from surgery.recipe import Evaluate, Recipe, check_recipe
from surgery.report.results import entries
from surgery.report.verdict import base_at_chance, main_place, tiles_of, verdict_of
from surgery.stats import wilson
from tests.support.reports import spliced

RECIPE = spliced("owner/base")


def share(value: float, chance: float | None = None, n: int = 200) -> dict[str, Any]:
    found = wilson(round(n * value), n)
    known = {"chance": chance} if chance is not None else {}
    return {"accuracy": found.value, "low": found.low, "high": found.high, "n": n, **known}


def arm(kv: float, facts: float = 0.9, perplexity: float = 2.4, **more: Any) -> dict[str, Any]:
    sizes = {"8": share(kv, 1 / 8), "64": share(kv / 2 if kv > 0.2 else kv / 8, 1 / 64)}
    return {"kv_retrieval": sizes, "closed_book": share(facts, 1 / 16), "perplexity": perplexity, **more}


def test(difference: float, significant: bool, half: float = 0.02) -> dict[str, Any]:
    ends = {"low": difference - half, "high": difference + half}
    return {"difference": difference, **ends, "p_two_sided": 0.01, "significant": significant}


test.__test__ = False  # type: ignore[attr-defined]


def results(hybrid: dict, control: dict | None, before: dict, /, **comparisons: Any) -> dict[str, Any]:
    """With tests of all tasks that are significant if intervals do not overlap; `comparisons` replace them."""
    arms = {"base": before, **({"no_splice": control} if control else {}), "hybrid": hybrid}
    tests: dict[str, dict[str, Any]] = {name: {} for name in arms if name != "hybrid"}
    for name, of in tests.items():
        other = dict(entries(arms[name]))
        for place, e in entries(hybrid):
            if "accuracy" in e and place in other:
                o = other[place]
                apart = e["low"] > o["high"] or e["high"] < o["low"]
                of["/".join(place)] = test(e["accuracy"] - o["accuracy"], apart, 0.02 if apart else 0.2)
    return {"arms": arms, "comparisons": {"hybrid": {**tests, **comparisons}}}


def tuned(control: bool = True) -> Recipe:
    source = {"data": {"path": "rows.jsonl", "columns": {"answer_span": "auto"}, "holdout": 0.1}, "rows": 2}
    train = {"steps": 5, "sources": [{**source, "weights": {"answer": 1, "attention": 1}}]}
    recipe = {"name": "f", "base": {"model": "m"}, "splice": None, "train": train}
    return check_recipe(recipe | ({"control": {"model": "b"}} if control else {}))


def test_the_test_decides() -> None:
    """Its p-value on the main task: the correction over all tasks is for the others."""
    for difference, p, tone, word in (
        (0.5, 0.049, "better", "better"),
        (0.5, 0.051, "unclear", "not significantly better"),
        (-0.5, 0.049, "worse", "worse"),
        (-0.5, 0.051, "unclear", "not significantly better"),
    ):
        tests = {"kv_retrieval/8": {**test(difference, False), "p_two_sided": p}}
        verdict = verdict_of(results(arm(0.9), arm(0.4), arm(0.3), no_splice=tests), RECIPE)
        begin = f"The hybrid is {word} than the control: KV-retrieval, 8 pairs, 90.0% against 40.0%"
        assert verdict.tone == tone and verdict.sentence.startswith(begin)
        assert f"({100 * difference:+.1f} points [" in verdict.sentence and f"p {p})" in verdict.sentence


def test_a_base_at_chance_or_a_training_without_effect_gives_no_conclusion() -> None:
    """However large the difference to the control is."""
    tests = {"kv_retrieval/8": test(0.5, True)}
    at_chance = "the base is at chance on every probe of retrieval (KV-retrieval, 64 pairs, 1.5%, chance 1.6%)"
    same = {"kv_retrieval/8": {**test(0, False), "low": 0.0, "high": 0.0}}
    for hybrid, control, before, more, words in (
        (0.9, 0.4, 0.12, {}, at_chance[4:]),
        (0.9, 0.9, 0.9, {"base": same}, "hybrid is right on the same prompts as before training"),
        (0.14, 0.11, 0.12, {}, "All models are at chance: KV-retrieval, 8 pairs, at most 14.0% (chance 12.5%)"),
    ):
        verdict = verdict_of(results(arm(hybrid), arm(control), arm(before), no_splice=tests, **more), RECIPE)
        assert verdict.tone == "unclear" and "better" not in verdict.sentence and words in verdict.sentence
    assert base_at_chance(results(arm(0), None, arm(0.12))["arms"], RECIPE) is not None
    needle = {"needle_single": {"512": share(0.03)}}
    for known in (arm(0.25), {**arm(0.12), **needle}):  # one probe is enough, a generated one has chance 0
        assert base_at_chance({"base": known}, RECIPE) is None
    assert base_at_chance({"base": {"closed_book": share(0.1), "perplexity": 2.0}}, RECIPE) is None, "none measured"


def test_what_fell_is_named_with_before_after_and_interval() -> None:
    """Significant after the correction or not; within the interval facts alone are given."""
    falls = {"closed_book": test(-0.04, False), "kv_retrieval/64": test(-0.2, True), "kv_retrieval/8": test(0.5, True)}
    given = results(
        arm(0.6, 0.945), arm(0.1), arm(0.9, 0.985), base=falls, no_splice={"kv_retrieval/8": test(0.5, True)}
    )
    sentence = verdict_of(given, RECIPE).sentence
    facts = "closed-book facts, held-out half"
    assert f"{facts} fell from 98.5% to 94.5% (-4.0 points [-6.0, -2.0], p 0.01, too high with" in sentence
    assert "KV-retrieval, 64 pairs fell from 45.0% to 30.0%" in sentence
    kept = verdict_of(results(arm(0.9, 0.89), arm(0.4), arm(0.3)), RECIPE).sentence
    assert f"{facts}: 89.0% (base 90.0%, within the 95% interval)" in kept and "fell" not in kept
    assert f"{facts}: 90.0% (base 90.0%)" in verdict_of(results(arm(0.9), arm(0.4), arm(0.3)), RECIPE).sentence


def test_better_than_the_control_alone_is_not_hidden() -> None:
    """The control may have become worse in training."""
    for before, word in ((0.88, "not significantly better"), (0.98, "worse")):
        sentence = verdict_of(results(arm(0.9), arm(0.4), arm(before)), RECIPE).sentence
        assert sentence.startswith("The hybrid is better than the control")
        assert f"it is {word} than the base ({100 * before:.1f}%)" in sentence


def test_a_frozen_base_is_its_own_control() -> None:
    for recipe, doubted in ((RECIPE, True), (spliced("owner/base", {"trainable": "new_heads"}), False)):
        sentence = verdict_of(results(arm(0.9), None, arm(0.4)), recipe).sentence
        assert sentence.startswith("The hybrid is better than the base")
        assert ("no control was trained, so training alone may be the reason" in sentence) == doubted


COUNTS = {"found": 40, "ambiguous": 50, "missing": 5}


def test_few_exact_answers_get_advice() -> None:
    """None at all, or far fewer than right first tokens; what to try follows from the recipe and the data."""

    def advice(exact: float, first: float, recipe: Recipe, **more: Any) -> tuple[str, ...]:
        own = {"rows.jsonl": {**share(exact), "first_token": share(first)}, "texts": {"perplexity": 2.0}}
        none = {"held_out": {"rows.jsonl": share(0.0)}}
        verdict = verdict_of({"arms": {"base": none, "hybrid": {"held_out": own}}, **more}, recipe)
        assert ("its first token is right in" in verdict.sentence) == (0 < exact < first / 2)
        return verdict.advice

    (text,) = advice(0.15, 0.83, tuned())
    assert text.startswith(
        "rows.jsonl: the hybrid generates 15.0% of the 200 held-out answers exactly. The hybrid's first"
    )
    assert "83% of them. What to try: train longer (now 5 steps): repeat the command with train.steps=10." in text
    (text,) = advice(0.0, 0.0, tuned())
    assert text.startswith("rows.jsonl: no model generates any of the 200 held-out answers exactly. What to try: train")
    assert "check the format" in text and "answer_span" not in text
    absent = {"found": 0, "ambiguous": 0, "missing": 95}
    for counts, tip in (
        (COUNTS, True),
        ({**COUNTS, "marked": 30}, False),
        ({**COUNTS, "found": 200}, False),
        (absent, False),
    ):
        assert ("found it in 40 of 90 rows" in advice(0.0, 0.0, tuned(), answer_spans={"rows.jsonl": counts})[0]) == tip
    (text,) = advice(0.0, 0.0, tuned(), training={"finetune": {"steps": 5, "plateau": 4}})
    assert "(now 5 steps): a plateau ended a stage early, so increase `plateau.patience`" in text and "=10" not in text
    source = tuned().train.sources[0].model_copy(update={"weights": RECIPE.train.sources[0].weights})
    unsupervised = tuned().model_copy(update={"train": tuned().train.model_copy(update={"sources": (source,)})})
    assert "set `data.columns.answer_span: auto`" in advice(0.0, 0.0, unsupervised)[0]
    assert advice(0.5, 0.83, tuned()) == () and verdict_of(results(arm(0.9), None, arm(0.4)), RECIPE).advice == ()


def test_the_users_data_comes_first() -> None:
    own = {"rows.jsonl": {**share(0.8), "first_token": share(0.9), "loss": {"nats": 0.5, "tokens": 9}}}
    none = {"rows.jsonl": {**share(0.0), "first_token": share(0.1), "loss": {"nats": 5.0, "tokens": 9}}}
    given = results(arm(0.9, held_out=own), arm(0.9, held_out=none), arm(0.9, held_out=none))
    recipe = tuned()
    assert main_place(given["arms"], recipe) == ("held_out", "rows.jsonl")
    sentence = verdict_of(given, recipe).sentence
    assert "better than the control: rows.jsonl, held-out rows, exact match, 80.0% against 0.0%" in sentence
    assert "before fine-tuning 90.0%" in sentence
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
    facts = {"closed_book": share(0.5), "perplexity": 2.0}
    assert [tile.value for tile in tiles_of(results(facts, None, facts), RECIPE)] == ["50.0%", "2.000", "7 steps"]


def test_a_task_with_a_name_is_judged_as_the_task_that_it_is() -> None:
    tasks = [{"task": "closed_book", "name": "facts"}, {"task": "kv_retrieval", "pairs": [16], "name": "far"}]
    recipe = RECIPE.model_copy(update={"evaluate": Evaluate.model_validate({"tasks": tasks})})
    base, hybrid = ({"facts": share(f, 1 / 16), "far": {"16": share(0.06, 1 / 16)}} for f in (0.6, 0.55))
    found = verdict_of(results(hybrid, None, base), recipe).sentence
    assert main_place({"hybrid": hybrid}, recipe) == ("far", "16")
    assert found.startswith("All models are at chance: far, 16, at most 6.0% (chance 6.2%)")
    assert "facts: 55.0% (base 60.0%, within" in found
    assert "facts" in [tile.label for tile in tiles_of(results(hybrid, None, base), recipe)]
