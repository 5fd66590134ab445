"""Recipes with comments: the values load again, and every comment stands above its value."""

from __future__ import annotations

import json
from typing import Any

from surgery.recipe.yaml import load_yaml
from surgery.run.initial_recipe import commented_yaml

DATA: dict[str, Any] = {
    "name": "a-b.c",
    "base": {"model": "path: with #signs", "tokenizer": None},
    "locate": {"pairs": 12, "filler": (0, 20), "methods": ["query", "sharpen"]},
    "train": {"steps": 3, "sources": [{"task": "sentence", "weights": {"base_kl": 1.0}}, {"task": "kv", "rows": 2}]},
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
    }
    for comments in ({}, {("locate", "pairs"): "a: #b"}, long):
        text = commented_yaml(DATA, comments, ["head", ""])
        assert load_yaml(text) == json.loads(json.dumps(DATA)) and max(map(len, text.splitlines())) <= 120


def test_a_comment_stands_above_its_value() -> None:
    lines = commented_yaml(DATA, {("locate", "filler"): "far", ("train", "sources", 1): "second"}).splitlines()
    assert lines[lines.index("  # far") + 1] == "  filler: [0, 20]"
    assert lines[lines.index("    # second") + 1] == "    - {task: kv, rows: 2}"
