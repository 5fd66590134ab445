"""Entries of results.json."""

from __future__ import annotations

from typing import Any

import pytest

from surgery.report.results import entries, label_of, skipped_of_lm_eval, value_text


@pytest.mark.parametrize("name", ["accuracy", "perplexity", "nats", "mine"])
def test_held_out_data_may_have_any_name(name: str) -> None:
    answers: dict[str, Any] = {"accuracy": 0.5, "n": 2, "loss": {"nats": 1.0}}
    arm = {"closed_book": {"accuracy": 0.7}, "perplexity": 2.0, "held_out": {name: answers}}
    assert list(entries(arm)) == [
        (("held_out", name), answers),
        (("held_out", name, "loss"), answers["loss"]),
        (("closed_book",), arm["closed_book"]),
        (("perplexity",), {"perplexity": 2.0}),
    ]


def test_every_metric_of_lm_eval_is_an_entry() -> None:
    tasks = {
        "squad": {"exact_match,strict-match": 0.5, "exact_match_stderr,strict-match": 0.1, "f1,none": 0.75, "n": 4},
        "absent": {"skipped": "no data"},
    }
    found = list(entries({"perplexity": 2.0, "lm_eval": tasks}))[1:]
    assert [label_of(*entry) for entry in found] == [
        "squad (lm-eval), exact_match (strict-match)",
        "squad (lm-eval), f1",
    ]
    assert [value_text(entry) for _, entry in found] == ["0.500", "0.750"] and found[0][1]["n"] == 4
    assert skipped_of_lm_eval({"base": {}, "hybrid": {"lm_eval": tasks}}) == {"absent": "no data"}
