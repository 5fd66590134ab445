"""The study of lengths: its prompts, the ways of prefill, and its tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.studies.lengths import study
from bench.studies.lengths.prompts import CONDITIONS, LongDictionary, prompt
from surgery.probes.documents import rng_of
from surgery.probes.registry import Options
from tests.support.pico import pico_base, pico_hybrid, pico_site, pico_tokenizer, tokens


@pytest.mark.parametrize("condition", CONDITIONS)
def test_prompts_fill_their_length_and_ask_for_a_value_that_they_hold(condition: str) -> None:
    tokenizer = pico_tokenizer()
    for length in (256, 700, 2500):
        document = prompt(condition, length, 3, tokenizer)
        (question,) = document.questions
        begun = document.text[: question.answer[0]]
        assert 0.85 * length < len(tokenizer(begun)["input_ids"]) <= length
        assert question.segment is not None and question.value is not None
        line = document.text[slice(*question.segment)]
        assert line.startswith(begun.split("'")[-2]) and line.endswith(f":{question.choices[question.gold]}\n")
        assert document.text[slice(*question.value)] == document.text[slice(*question.answer)]


def test_the_probe_for_training_has_questions_about_different_lines() -> None:
    options = Options(pairs=8, questions=4, tokens=600, filler=(0, 3), tokenizer=pico_tokenizer())
    document = LongDictionary().document(rng_of(1), "train", options)
    values = [document.text[slice(*question.value)] for question in document.questions if question.value]
    assert len(set(values)) == 4 == len(document.questions)
    assert len(pico_tokenizer()(document.text)["input_ids"]) <= 600


@pytest.mark.parametrize("make", [pico_base, lambda: pico_hybrid([pico_site(1)])], ids=["base", "hybrid"])
def test_segments_compute_the_same_as_the_whole_prompt(make: Any) -> None:
    model, ids = make(), tokens(1, 50)
    (whole, one), (parts, other) = study.prefill(model, ids, 50), study.prefill(model, ids, 16)
    assert torch.equal(whole, parts)
    for name in one.layers[0].recurrent_states:
        first, second = (cache.layers[0].recurrent_states[name] for cache in (one, other))
        torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-4)


def test_tables_and_figure_of_some_arms(tmp_path: Path) -> None:
    arm = {"prefill": 1.0, "decode": 0.01, "peak_bytes": 2**20, "kv_bytes": 2**21}
    results = {
        "cost-whole-1024": {"base": arm, "hybrid": arm},
        "text-base-256": {"correct": "1101"},
        "text-hybrid-256": {"correct": "1111"},
    }
    made = study.tables(results)
    assert "| 1,024 | `whole` | 1.00 | 1.00 | 10 | 10 | 1 | 1 | 2.0 |" in made["lengths-cost"]
    assert "0.750" in made["lengths-accuracy"] and "1.000" in made["lengths-accuracy"]
    study.figure(results, tmp_path)
    assert (tmp_path / "lengths.svg").is_file() and (tmp_path / "lengths.csv").is_file()
