"""The example's lines: what they ask, where the answer stands, and that a seed is a file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from random import Random
from runpy import run_path
from typing import Any

import pytest

from tests.support.pico import pico_tokenizer

SCRIPT = Path(__file__).parents[2] / "examples" / "tickets.py"
LINES: list[dict[str, Any]] = [run_path(str(SCRIPT))["ticket_line"](Random(i)) for i in range(40)]


def test_the_answer_is_the_agent_of_the_customer_that_is_asked_for() -> None:
    for line in LINES:
        tickets = re.findall(r"^- (\w+):(\d+)$", line["prompt"], re.M)
        asked = re.search(r"ticket of (\w+)\?\n$", line["prompt"])
        assert asked is not None and dict(tickets)[asked[1]] == line["answer"]
        assert line["prompt"][slice(*line["answer_span"])] == line["answer"]
        start = line["answer_span"][0]
        assert line["prompt"][:start].endswith(f"- {asked[1]}:"), "the span is the asked ticket's own"


def test_nothing_but_the_ticket_tells_the_answer() -> None:
    for line in LINES:
        tickets = re.findall(r"^- (\w+):(\d+)$", line["prompt"], re.M)
        assert 12 <= len(tickets) <= 24
        assert all(len(set(column)) == len(tickets) for column in zip(*tickets, strict=True))
    places = {line["prompt"][: line["answer_span"][0]].count("\n") for line in LINES}
    assert len(places) > 10, "the asked ticket stands anywhere"


def test_answers_are_one_token_of_the_shipped_models() -> None:
    assert {len(pico_tokenizer()(line["answer"])["input_ids"]) for line in LINES} == {1}


def test_a_seed_is_a_file(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.jsonl" for i in range(3)]
    for path, seed in zip(paths, (0, 0, 1), strict=True):
        command = [sys.executable, str(SCRIPT), str(path), "--lines", "30", "--seed", str(seed)]
        assert subprocess.run(command, capture_output=True).returncode == 0
    first, same, other = (path.read_text() for path in paths)
    assert first == same != other and len([json.loads(row) for row in first.splitlines()]) == 30


@pytest.mark.parametrize(("low", "high"), [(2, 2), (3, 5)])
def test_the_number_of_tickets_is_as_asked(low: int, high: int) -> None:
    lines = [run_path(str(SCRIPT))["ticket_line"](Random(i), low, high) for i in range(10)]
    assert all(low <= line["prompt"].count("\n- ") <= high for line in lines)
