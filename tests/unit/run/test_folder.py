"""Which recipes may continue in the folder of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from surgery.errors import RunError
from surgery.run.folder import RunDir


def recipe(splice: bool = False, data: str = "tickets.jsonl", **more: object) -> str:
    """A recipe in full, as far as a folder reads it."""
    sources = [{"data": {"path": data}}, {"task": "kv_retrieval", "data": None}]
    keys = {"name": "a", "seed": 0, "base": {"model": "m", "revision": None}, "locate": {}}
    keys |= {"splice": {"num_heads": 1} if splice else None, "train": {"steps": 3, "sources": sources, "stages": []}}
    return yaml.safe_dump({**keys, **more}, sort_keys=False)


def test_another_data_set_is_another_run_if_nothing_else_would_be_left(tmp_path: Path) -> None:
    RunDir(tmp_path).claim(recipe())
    with pytest.raises(RunError, match=r"another recipe \(data: tickets\.jsonl\).*--overwrite"):
        RunDir(tmp_path).claim(recipe(data="letters.jsonl"))
    assert (tmp_path / "recipe.yaml").read_text() == recipe()
    RunDir(tmp_path).claim(recipe(data="letters.jsonl"), overwrite=True)
    assert (tmp_path / "recipe.yaml").read_text() == recipe(data="letters.jsonl")


def test_data_of_stages_counts_too(tmp_path: Path) -> None:
    stages = [{"name": "one", "sources": [{"data": {"path": path}} for path in ("x", "y")]}]
    RunDir(tmp_path).claim(recipe(train={"sources": [], "stages": stages}))
    stages[0]["sources"] = [{"data": {"path": "x"}}]
    with pytest.raises(RunError, match=r"\(data: x, y\)"):
        RunDir(tmp_path).claim(recipe(train={"sources": [], "stages": stages}))


def test_located_heads_stay_with_another_data_set(tmp_path: Path) -> None:
    RunDir(tmp_path).claim(recipe(splice=True))
    RunDir(tmp_path).claim(recipe(splice=True, data="letters.jsonl"))


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [("seed", 1, "seed: 0"), ("base", {"model": "n", "revision": None}, "base.model: m"), ("name", "b", "name: a")],
)
def test_the_error_names_what_differs(key: str, value: object, told: str, tmp_path: Path) -> None:
    RunDir(tmp_path).claim(recipe())
    with pytest.raises(RunError, match=rf"another recipe \({told}\)"):
        RunDir(tmp_path).claim(recipe(**{key: value}))


@pytest.mark.parametrize("text", ["a: [", "- 1\n", "just text"])
def test_a_recipe_that_cannot_be_read_is_another_one(text: str, tmp_path: Path) -> None:
    RunDir(tmp_path).claim(recipe())
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(RunError, match="cannot be read"):
        RunDir(tmp_path).claim(recipe())


def test_steps_and_control_may_change(tmp_path: Path) -> None:
    RunDir(tmp_path).claim(recipe())
    sources = yaml.safe_load(recipe())["train"]["sources"]
    RunDir(tmp_path).claim(recipe(train={"steps": 4, "sources": sources, "stages": []}, control={"model": "n"}))
