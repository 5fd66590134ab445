"""Entries of results.json, and the rows that are shown of them."""

from __future__ import annotations

from typing import Any

from surgery.recipe import check_recipe
from surgery.report.results import entries, label_of, rows_of, skipped_of_lm_eval, trained_pairs, value_text


def test_held_out_data_may_have_any_name() -> None:
    for name in ("accuracy", "perplexity", "nats", "mine"):
        answers: dict[str, Any] = {"accuracy": 0.5, "n": 2, "loss": {"nats": 1.0}}
        arm = {"closed_book": {"accuracy": 0.7}, "perplexity": 2.0, "prose": 3.0, "held_out": {name: answers}}
        assert list(entries(arm)) == [
            (("held_out", name), answers),
            (("held_out", name, "loss"), answers["loss"]),
            (("closed_book",), arm["closed_book"]),
            (("perplexity",), {"perplexity": 2.0}),
            (("prose",), {"perplexity": 3.0}),
        ]


def test_every_metric_of_lm_eval_is_an_entry() -> None:
    tasks = {
        "squad": {"exact_match,strict-match": 0.5, "exact_match_stderr,strict-match": 0.1, "f1,none": 0.75, "n": 4},
        "absent": {"skipped": "no data"},
    }
    found = list(entries({"perplexity": 2.0, "lm_eval": tasks}))[1:]
    labels = ["squad (lm-eval), exact_match (strict-match)", "squad (lm-eval), f1"]
    assert [label_of(*entry) for entry in found] == labels
    assert [value_text(entry) for _, entry in found] == ["0.500", "0.750"] and found[0][1]["n"] == 4
    assert skipped_of_lm_eval({"base": {}, "hybrid": {"lm_eval": tasks}}) == {"absent": "no data"}


def test_pairs_in_training_are_those_with_values_of_the_evaluated_length() -> None:
    weights: dict[str, Any] = {"weights": {"answer": 1.0}}
    source = {"task": "kv_retrieval", "rows": 1, **weights}
    long = {**source, "pairs": [16, 40], "value_digits": [3, 6]}
    train = {"steps": 1, "sources": [{**source, "pairs": [50, 80]}, {**source, "pairs": [60, 100]}, long]}
    for task, expected in (({}, (50, 100)), ({"value_digits": [3, 6]}, (16, 40)), ({"name": "mine"}, (50, 100))):
        tasks = [{"task": "kv_retrieval", "pairs": [8], **task}]
        recipe = {"name": "a", "base": {"model": "m"}, "train": train, "evaluate": {"tasks": tasks}}
        assert trained_pairs(check_recipe(recipe)) == expected
    assert trained_pairs(check_recipe({**recipe, "train": {"sources": [{**source, "task": "records"}]}})) is None


def test_a_task_is_hidden_if_every_arm_is_at_chance() -> None:
    base = {"accuracy": 0.25, "low": 0.2, "high": 0.31, "n": 200, "chance": 0.25}
    for place, hybrid, is_hidden in (
        ("closed_book", {}, True),
        ("closed_book", {"accuracy": 0.1, "low": 0.06, "high": 0.15}, False),  # below chance, which the base is not
        ("closed_book", {"generated": {"accuracy": 0.2, "n": 200}}, False),
        ("pairs", {}, False),  # KV-retrieval under a name of its own
    ):
        found = rows_of({"hybrid": {place: {**base, **hybrid}}, "base": {place: base}}, {"pairs": "kv_retrieval"})
        assert [row[0] for row in found.shown][:1] == ([] if is_hidden else [(place,)]), (place, hybrid)
        assert found.at_chance == ([label_of((place,), {})] if is_hidden else [])
