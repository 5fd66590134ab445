"""Recipes from findings that are made up: they are valid, and say why."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from surgery.recipe import Base, Recipe, check_recipe
from surgery.recipe.yaml import load_yaml
from surgery.run.initial_recipe import commented_yaml, recipe_name, write_recipe
from surgery.run.machine import GIB, Machine
from surgery.run.measuring import Findings
from surgery.run.probing import ADJACENT, FAR, Format, Screening, Share
from tests.support.pico import pico_config

CPU = Machine("2 CPU cores", 16 * GIB, 1, False)
RECORDS = Format("records")


def findings(**more: Any) -> Findings:
    """A base that answers .81 of 12 pairs apart, and knows facts."""
    share = Share(39, 48, 1 / 12)
    values: dict[str, Any] = {
        "base": Base(model="somewhere/base"),
        "config": pico_config(vocab_size=1024),
        "parameters": 500_000,
        "machine": CPU,
        "screening": Screening({FAR: share, ADJACENT: share, RECORDS: share}, 8, {Format("mqar"): "too few words"}),
        "form": FAR,
        "pairs": 12,
        "share": share,
        "sizes": (6, 12, 24, 48),
        "known": {"closed_book": Share(64, 64, 0.1)},
        "batch_size": 8,
        "speeds": {4: 50.0, 8: 80.0},
        "tokens": 100,
        "perplexity": 3.0,
        "ladder": {8: 0.95, 12: 39 / 48, 24: 0.5},
    }
    return Findings(**{**values, **more})


def written(found: Findings) -> tuple[Recipe, str]:
    text = write_recipe(found, lambda line: None)
    return check_recipe(load_yaml(text)), text


def comment_above(text: str, line: str) -> str:
    lines = [entry.strip() for entry in text.splitlines()]
    at = next(i for i, entry in enumerate(lines) if entry.startswith(line))
    return lines[at - 1]


def test_what_was_measured_is_in_the_recipe_and_its_comments() -> None:
    recipe, text = written(findings())
    assert (recipe.locate.pairs, recipe.locate.filler, recipe.evaluate.batch_size) == (12, (0, 20), 8)
    assert recipe.splice is not None and recipe.splice.select == "patching"
    assert "the base answers .81 of 48 prompts (.95 of 8, .50 of 24)" in " ".join(text.replace("#", "").split())
    assert comment_above(text, "batch_size") == "# Seconds a prompt by batch size: 4: 0.02, 8: 0.013."
    assert "too few words" in text
    tasks = {entry.result_name: entry.pairs for entry in recipe.evaluate.tasks if entry.pairs}
    assert tasks == {"kv_retrieval": (6, 12, 24, 48), "adjacent_pairs": (24,), "records": (8,)}
    assert {"closed_book", "perplexity"} <= {entry.task for entry in recipe.evaluate.tasks}


def test_copies_are_widened_where_the_state_is_small() -> None:
    config = pico_config(vocab_size=1024)
    for config.state_size, width in ((16, 64), (32, None), (128, None)):
        recipe, _ = written(findings(config=config))
        assert recipe.splice is not None and recipe.splice.min_width == width


def test_training_covers_half_to_twice_the_pairs_and_supervises_attention() -> None:
    recipe, _ = written(findings())
    apart, adjacent, *kept = recipe.train.sources
    assert apart.pairs == adjacent.pairs == (6, 24) and apart.filler == (0, 12) and adjacent.filler is None
    assert all(source.weights.uses("attention") for source in (apart, adjacent))
    assert [source.name for source in kept] == ["closed_book", "statement", "sentence"]
    assert all(source.weights.uses("base_kl") and source.split == 0 for source in kept)


def test_a_base_at_chance_gets_a_recipe_that_says_so() -> None:
    recipe, text = written(findings(share=None, known={}, screening=Screening({ADJACENT: Share(8, 64, 1 / 8)}, 8, {})))
    assert recipe.splice is not None and recipe.splice.select == "random"
    assert "AT CHANCE" in text and "What to try" in text and "kv_retrieval, 8 pairs: .12 of 64 prompts" in text
    assert {entry.task for entry in recipe.evaluate.tasks} == {"kv_retrieval", "perplexity"}
    assert [source.name for source in recipe.train.sources if source.weights.uses("base_kl")] == ["sentence"]


def test_heads_of_a_base_that_answers_everything_are_ranked() -> None:
    recipe, text = written(findings(share=Share(48, 48, 0.01), pairs=100, sizes=(50, 100)))
    assert recipe.splice is not None and recipe.splice.select == "patching" and "is harder" in text


def test_another_format_is_trained_where_the_base_answers_it_best() -> None:
    recipe, _ = written(findings(form=RECORDS))
    assert recipe.locate.task == "records" and recipe.train.sources[0].task == "records"
    assert {entry.result_name for entry in recipe.evaluate.tasks} >= {"records", "apart", "adjacent_pairs"}


def test_a_slow_base_is_measured_on_fewer_prompts() -> None:
    fast, slow = (written(findings(speeds={8: speed}))[0] for speed in (10_000.0, 0.1))
    assert slow.locate.examples < fast.locate.examples and slow.evaluate.examples < fast.evaluate.examples
    assert len(slow.locate.methods) < len(fast.locate.methods)


def test_the_users_data_is_a_source() -> None:
    source = {"data": {"path": "mine.jsonl", "columns": {"answer_span": "auto"}}, "rows": 8,
              "weights": {"answer": 1.0, "attention": 1.0}}  # fmt: skip
    recipe, text = written(findings(own_data=(source, "Your data: 3 of 4.")))
    assert recipe.train.own_data[0].path == "mine.jsonl" and "# Your data: 3 of 4." in text


def test_large_bases_train_new_heads_which_first_learn_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surgery.run.initial_recipe._estimate", lambda data: 2**30)
    gpu = replace(CPU, on_gpu=True, memory=80 * GIB)
    for parameters, machine, steps, expected in (
        (130_000_000, CPU, 310, {"micro_batch": None}),
        (130_000_000, gpu, 500, {"precision": "fp32"}),
        (8_000_000_000, gpu, 500, {"precision": "bf16"}),
        (130_000_000, replace(CPU, memory=2**16), 310, {"micro_batch": 1}),
    ):
        recipe, text = written(findings(parameters=parameters, machine=machine))
        pairs, *longer = (source for source in recipe.train.sources if source.weights.uses("attention"))
        assert pairs.value_digits is None and [(s.name, s.value_digits) for s in longer] == [
            ("kv_retrieval", (3, 6)),
            ("records", (3, 6)),
        ]
        kept = [source.name for source in recipe.train.sources if source.weights.uses("base_kl")]
        assert kept == ["closed_book", "statement", "base_text"]
        assert {"kv_retrieval_long", "records_long"} <= {entry.result_name for entry in recipe.evaluate.tasks}
        assert {key: getattr(recipe.train, key) for key in expected} == expected
        assert recipe.train.num_all_steps == steps and not recipe.train.has_control
        assert [stage.trainable for stage in recipe.train.sequence] == ["reads", "new_heads"]
        assert recipe.splice is not None and (recipe.splice.num_heads, recipe.splice.output) == (8, "copy")
        assert "splice.form=pair" in text
        pair = check_recipe(load_yaml(text) | {"splice": {**load_yaml(text)["splice"], "form": "pair"}})
        assert pair.splice is not None and pair.splice.init == "ssm"
        assert "Memory: about 1.0 GiB" in " ".join(text.replace("#", "").split())


def test_names_are_names_of_folders() -> None:
    for model, name in (
        ("owner/mamba2-130m", "mamba2-130m"),
        ("runs/a b/", "a-b"),
        ("owner/mamba2-130m@abc", "mamba2-130m"),
        ("..", None),
    ):
        assert name is None or recipe_name(model) == name
        check_recipe({"name": recipe_name(model), "base": {"model": "b"}})


DATA: dict[str, Any] = {
    "name": "a-b.c",
    "base": {"model": "path: with #signs", "tokenizer": None},
    "locate": {"pairs": 12, "filler": (0, 20), "methods": ["query", "sharpen"]},
    "train": {"steps": 3, "sources": [{"task": "sentence", "weights": {"base_kl": 1.0}}, {"task": "kv", "rows": 2}]},
    "stages": [{"name": "a", "sources": [{"task": "kv"}]}, {"name": "b", "steps": 2, "sources": [{"task": "kv"}]}],
    "text": "ä \n two lines",
    "small": 1e-05,
    "flag": True,
    "tasks": ["perplexity", {"task": "kv", "pairs": (2, 4)}],
}


def test_values_load_again() -> None:
    long = {
        ("locate", "pairs"): "word " * 100,
        ("train", "sources", 1): "why",
        ("train",): "x " * 200,
        ("tasks", 0): "y",
        ("stages", 1, "sources", 0): "word " * 100,
        ("stages", 1): "of a stage",
    }
    for comments in ({}, {("locate", "pairs"): "a: #b"}, long):
        text = commented_yaml(DATA, comments, ["head", ""])
        assert load_yaml(text) == json.loads(json.dumps(DATA)) and max(map(len, text.splitlines())) <= 120
