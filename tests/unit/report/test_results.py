"""Entries of results.json."""

from __future__ import annotations

from typing import Any

import pytest

from surgery.report.results import entries


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
