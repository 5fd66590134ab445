"""Which recipes may continue in the folder of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from surgery.errors import RunError
from surgery.recipe import check_recipe, to_yaml
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


def test_the_error_names_what_differs(tmp_path: Path) -> None:
    RunDir(tmp_path).claim(recipe())
    base = {"model": "n", "revision": None}
    for key, value, told in (("seed", 1, "seed: 0"), ("base", base, "base.model: m"), ("name", "b", "name: a")):
        with pytest.raises(RunError, match=rf"another recipe \({told}\)"):
            RunDir(tmp_path).claim(recipe(**{key: value}))
    for text in ("a: [", "- 1\n", "just text"):
        (tmp_path / "recipe.yaml").write_text(text)
        with pytest.raises(RunError, match="cannot be read"):
            RunDir(tmp_path).claim(recipe())


def test_steps_control_and_data_beside_located_heads_may_change(tmp_path: Path) -> None:
    RunDir(tmp_path / "spliced").claim(recipe(splice=True))
    RunDir(tmp_path / "spliced").claim(recipe(splice=True, data="letters.jsonl"))
    RunDir(tmp_path / "a").claim(recipe())
    sources = yaml.safe_load(recipe())["train"]["sources"]
    RunDir(tmp_path / "a").claim(recipe(train={"steps": 4, "sources": sources, "stages": []}, control={"model": "n"}))


def test_changes_of_a_recipe_are_listed(tmp_path: Path) -> None:
    source = {"task": "sentence", "rows": 2, "weights": {"base_kl": 1.0}}
    data = {"name": "a", "base": {"model": "m"}, "splice": None, "train": {"steps": 3, "sources": [source]}}
    first = check_recipe(data)
    assert RunDir(tmp_path).changes(first) == []
    RunDir(tmp_path).claim(to_yaml(first))
    assert RunDir(tmp_path).changes(first) == []
    more = {"steps": 4, "sources": [{**source, "weights": {"lm": 0.5}}]}
    assert RunDir(tmp_path).changes(check_recipe({**data, "train": more})) == [
        "train.steps: 3 -> 4",
        "train.sources.0.weights.lm: not set -> 0.5",
        "train.sources.0.weights.base_kl: 1.0 -> not set",
    ]


def test_a_recipe_of_another_form_has_no_changes(tmp_path: Path) -> None:
    first = check_recipe({"name": "a", "base": {"model": "m"}, "train": {"steps": 3}})
    stored = yaml.safe_load(to_yaml(first))
    del stored["train"]["plateau"], stored["evaluate"]["read_twice"]  # it has fewer keys
    for text in (yaml.safe_dump(stored), "[damaged"):
        (tmp_path / "recipe.yaml").write_text(text)
        assert RunDir(tmp_path).changes(first) == []
