"""Every recipe validates, and dry-runs offline from the configs kept in the repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from surgery.errors import ModelError, RunError
from surgery.models.loading import load_config
from surgery.models.lookup import family_of
from surgery.models.sizes import meta_model
from surgery.recipe import AnalysisRecipe, Base, PretrainRecipe, Recipe, load_any, load_recipe
from surgery.run.changes import expand
from surgery.run.dry_run import LENGTHS, dry_run
from tests.integration.conftest import BASE, ROOT

RECIPES = {path.stem: path for path in sorted((ROOT / "recipes").glob("*.yaml"))}
LOADED = {name: load_any(path) for name, path in RECIPES.items()}
ON_PICO = ("quickstart", "finetune")
OPERATIONS = [name for name, recipe in LOADED.items() if isinstance(recipe, Recipe) and name not in ON_PICO]
ANALYSES = [name for name, recipe in LOADED.items() if isinstance(recipe, AnalysisRecipe)]

# Parameters that the names of these checkpoints promise, in millions.
PROMISED = {
    "mamba2-130m": 129, "mamba2-370m": 368, "mamba2-780m": 780, "mamba2-1.3b": 1344, "mamba2-2.7b": 2703,
    "falcon-mamba-7b": 7273, "Zamba2-7B": 7357, "Llama-3.1-8B": 8030, "Llama-3.2-1B": 1236,
}  # fmt: skip


def kept(model: str) -> Path:
    """Of a checkpoint that ships, or the config that the repository keeps of a published one."""
    if (ROOT / model / "config.json").is_file():
        return ROOT / model
    return ROOT / "recipes" / "configs" / model.split("/")[-1]


def test_the_config_of_every_base_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the size that its name says; those of mamba_ssm as published, without a model type."""
    monkeypatch.chdir(ROOT)
    for name in (*OPERATIONS, *ANALYSES):
        recipe = LOADED[name]
        assert not isinstance(recipe, PretrainRecipe)
        config = load_config(recipe.base.model_copy(update={"model": str(kept(recipe.base.model))}))
        assert family_of(config).mixers(config), name
        if isinstance(recipe, AnalysisRecipe):
            teacher = load_config(Base(model=str(kept(recipe.teacher.model)))) if recipe.teacher else None
            expand(recipe, config, teacher)
        elif recipe.splice.teacher is not None:
            teacher = load_config(Base(model=str(kept(recipe.splice.teacher.model))))
            assert teacher.hidden_size == config.hidden_size, name
    for folder in sorted((ROOT / "recipes" / "configs").glob("*/")):
        model = meta_model(load_config(Base(model=str(folder))))
        promised = PROMISED.get(folder.name.removesuffix("-Instruct"))
        assert promised in (None, round(sum(p.numel() for p in model.parameters()) / 1e6)), folder.name
    plain = json.loads((kept("mamba2-130m") / "config.json").read_text())
    assert "model_type" not in plain and plain["ssm_cfg"] == {"layer": "Mamba2"}
    with pytest.raises(ValueError, match="model_type"):
        AutoConfig.from_pretrained(str(kept("mamba2-130m")))


def test_a_dry_run_takes_its_shapes_from_the_kept_config(tmp_path: Path) -> None:
    """With one short document a step: the shapes are the real ones. bench/nightly has the other recipes."""
    for name in ("mamba2-130m", "llamba-1b-head"):
        path = RECIPES[name]
        source = "{task: kv_retrieval, rows: 1, pairs: [4, 4], weights: {answer: 1.0, attention: 1.0, base_kl: 1.0}}"
        recipe = load_recipe(path, [f"train.sources=[{source}]"])
        assert_complete(dry_run(recipe, tmp_path / name, path), recipe)
    for model in ("./mamba2-130m", "../mamba2-130m", "a/b/mamba2-130m", "no folder", "mamba2-130m"):
        with pytest.raises(ModelError, match=r"base\.model"):  # only an id of the Hub does
            dry_run(load_recipe(RECIPES["mamba2-130m"], [f"base.model={model}"]), tmp_path / "x", path)
    assert not list(tmp_path.iterdir())


def assert_complete(found: dict[str, Any], recipe: Recipe) -> None:
    """Every number of a dry run is there and makes sense beside the others."""
    memory, cache = found["memory"], found["cache"]
    assert found["shapes_from"] == str(kept(recipe.base.model))
    assert 0 < found["new_parameters"] < found["parameters"]
    everything = recipe.train.trainable == "all"
    assert (found["trainable_parameters"] > found["new_parameters"]) == everything
    assert memory["total"] == sum(size for part, size in memory.items() if part != "total")
    assert memory["activations"] > 0 and found["flops"]["step"] > 0
    own = found["tokens"]["step"] * recipe.train.steps * found["arms"]
    assert found["tokens"]["run"] > own if recipe.train.read_steps else found["tokens"]["run"] == own > 0
    for arm in cache.values():
        sizes = [arm[length] for length in LENGTHS]
        assert sizes == [arm["state"] + arm["kv_per_token"] * n for n in LENGTHS.values()]
    assert cache["hybrid"]["kv_per_token"] > cache["base"]["kv_per_token"]
    assert recipe.hardware.memory_gib is not None
    assert found["fits"]["fits"] == (found["fits"]["left"] >= 0)
    assert ("held on a device" in found["locating"]) == (recipe.splice is not None)


def test_a_dry_run_says_what_does_not_fit(tmp_path: Path) -> None:
    path = RECIPES["quickstart"]
    small = [f"base.model={BASE}", *(f"train.sources.{i}.rows=1" for i in range(5)), "train.sources.0.pairs=[4, 4]"]
    tight = load_recipe(path, [*small, "hardware={gpu: toy, memory_gib: 0.001}"])
    other = load_recipe(path, [*small, "hardware={gpu: toy}"])
    found, here, unknown = (
        dry_run(recipe, tmp_path / "x", path) for recipe in (tight, load_recipe(path, small), other)
    )
    assert found["fits"]["fits"] is False and found["fits"]["left"] < 0
    assert here["fits"]["fits"] is True and here["fits"]["gpu"].startswith("This machine (")
    assert unknown["fits"] is None and here["shapes_from"] == ""
    assert found["memory"] == here["memory"] == unknown["memory"]


def test_a_dry_run_counts_the_control_in_the_stages_that_it_trains(tmp_path: Path) -> None:
    path, source = RECIPES["quickstart"], "{task: sentence, rows: 2, weights: {lm: 1}}"

    def tokens(*trainable: str) -> int:
        stages = ", ".join(
            f"{{name: s{i}, steps: 3, trainable: {t}, sources: [{source}]}}" for i, t in enumerate(trainable)
        )
        overrides = [f"base.model={BASE}", f"train={{stages: [{stages}]}}", "hardware={tflops: 1.0}"]
        found = dry_run(load_recipe(path, overrides), tmp_path / "x", path)
        assert found["time"]["seconds"] == pytest.approx(found["flops"]["run"] / 1e12)
        return found["tokens"]["run"]

    new, both = tokens("new_heads"), tokens("new_heads", "all")
    assert both == pytest.approx(3 * new, rel=0.2)  # the control trains the second stage alone


def test_a_dry_run_refuses_a_folder_that_the_run_would_refuse(tmp_path: Path) -> None:
    path, folder = RECIPES["quickstart"], tmp_path / "thesis"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    recipe = load_recipe(path, [f"base.model={BASE}"])
    for overwrite in (False, True):
        with pytest.raises(RunError, match="run folder"):
            dry_run(recipe, folder, path, overwrite)
    assert [p.name for p in folder.iterdir()] == ["thesis.txt"]
