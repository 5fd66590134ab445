"""Recipes with comments: the values load again, and every comment stands above its value."""

from __future__ import annotations

from typing import Any

import pytest

from surgery.init.commented_yaml import commented_yaml
from surgery.recipe.yaml import load_yaml

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


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize(
    "comments",
    [{}, {("locate", "pairs"): "a: #b"}, {("train", "sources", 1): "why", ("train",): "x " * 200, ("tasks", 0): "y"}],
)
def test_values_load_again(comments: dict[Any, str]) -> None:
    assert load_yaml(commented_yaml(DATA, comments, ["head", ""])) == plain(DATA)


def test_a_comment_stands_above_its_value() -> None:
    lines = commented_yaml(DATA, {("locate", "filler"): "far", ("train", "sources", 1): "second"}).splitlines()
    assert lines[lines.index("  # far") + 1] == "  filler: [0, 20]"
    assert lines[lines.index("    # second") + 1] == "    - {task: kv, rows: 2}"


def test_long_comments_are_wrapped() -> None:
    lines = commented_yaml(DATA, {("locate", "pairs"): "word " * 100}).splitlines()
    assert max(map(len, lines)) <= 120 and sum(line.startswith("  # word") for line in lines) > 3


def test_a_comment_without_a_value_is_a_fault() -> None:
    with pytest.raises(KeyError):
        commented_yaml(DATA, {("locate", "absent"): "why"})
