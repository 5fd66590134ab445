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
from surgery.reproduce.expansion import check_change, expand
from surgery.run.dry_run import LENGTHS, dry_run
from tests.integration.conftest import BASE, ROOT
from tests.support.processes import library

RECIPES = {path.stem: path for path in sorted((ROOT / "recipes").glob("*.yaml"))}
LOADED = {name: load_any(path) for name, path in RECIPES.items()}
ON_PICO = ("quickstart", "finetune")
OPERATIONS = [name for name, recipe in LOADED.items() if isinstance(recipe, Recipe) and name not in ON_PICO]
ANALYSES = [name for name, recipe in LOADED.items() if isinstance(recipe, AnalysisRecipe)]
CONFIGS = sorted(path.parent.name for path in (ROOT / "recipes" / "configs").glob("*/config.json"))

# Those whose dry run is timed and weighed, each in a process of its own. The times are of a busy machine.
TIMED = ("mamba2-2.7b", "zamba2-7b")
ALIKE = {"mamba2-370m", "mamba2-780m", "mamba2-1.3b"}  # as mamba2-2.7b, which is tried at its true size
SECONDS, GIB = 240, 4.0
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


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_it_is(name: str) -> None:
    text = RECIPES[name].read_text()
    header = text.split("\nname:")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    assert f"surgery {'analyse' if name in ANALYSES else ''}".strip() in header
    assert LOADED[name].name == name or isinstance(LOADED[name], PretrainRecipe)
    if name in OPERATIONS or name in ANALYSES:
        said = ("Time: estimated", "Not verified: never run")
        if name == "mamba2-130m":  # ran on weights that are not the published ones, and was timed
            said = ("Time: on one CPU core", "Not verified on the published weights. `make real-shape` ran it")
        if name.startswith("pico-"):
            said = ("Time: on one CPU core", "Measured")
        for word in ("GPUs:", "Published", *said):
            assert word in header, f"{name} does not say {word!r}"
        assert len(text.splitlines()) <= 32


@pytest.mark.parametrize("name", [*OPERATIONS, *ANALYSES])
def test_the_config_of_every_base_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    recipe = LOADED[name]
    assert not isinstance(recipe, PretrainRecipe)
    config = load_config(recipe.base.model_copy(update={"model": str(kept(recipe.base.model))}))
    assert family_of(config).mixers(config)
    if isinstance(recipe, AnalysisRecipe):
        teacher = load_config(Base(model=str(kept(recipe.teacher.model)))) if recipe.teacher else None
        sweeps, single = expand(recipe, config)
        for change in (*single, *(c for changes in sweeps.values() for c in changes)):
            check_change(change, config, recipe.teacher, teacher)
    elif recipe.splice.teacher is not None:
        teacher = load_config(Base(model=str(kept(recipe.splice.teacher.model))))
        assert teacher.hidden_size == config.hidden_size


@pytest.mark.parametrize("name", CONFIGS)
def test_kept_configs_are_of_the_size_that_their_name_says(name: str) -> None:
    model = meta_model(load_config(Base(model=str(ROOT / "recipes" / "configs" / name))))
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    promised = PROMISED.get(name.removesuffix("-Instruct"))
    assert promised is None or round(millions) == promised
    assert name in (ROOT / "recipes" / "configs" / "README.md").read_text() or name.endswith("-Instruct")


@pytest.mark.parametrize("name", sorted(set(OPERATIONS) - set(TIMED) - ALIKE))
def test_dry_runs_from_the_kept_config(name: str, tmp_path: Path) -> None:
    """With one short document a step: the shapes are the real ones."""
    path = RECIPES[name]
    source = "{task: kv_retrieval, rows: 1, pairs: [4, 4], weights: {answer: 1.0, base_kl: 1.0}}"
    recipe = load_recipe(path, [f"train.sources=[{source}]"])
    found = dry_run(recipe, tmp_path / name, path)
    assert_complete(found, recipe)
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
    assert found["tokens"]["run"] == found["tokens"]["step"] * recipe.train.steps * found["arms"] > 0
    for arm in cache.values():
        sizes = [arm[length] for length in LENGTHS]
        assert sizes == [arm["state"] + arm["kv_per_token"] * n for n in LENGTHS.values()]
    assert cache["hybrid"]["kv_per_token"] > cache["base"]["kv_per_token"]
    assert recipe.hardware.memory_gib is not None
    assert found["fits"]["fits"] == (found["fits"]["left"] >= 0)
    assert ("held on a device" in found["locating"]) == (recipe.splice is not None)


@pytest.mark.parametrize("name", TIMED)
def test_a_dry_run_at_true_size_is_quick_and_light(name: str, tmp_path: Path) -> None:
    """Unchanged, as a user runs it, without a network."""
    code = (
        "import json, resource, sys, time; from pathlib import Path\n"
        "from surgery.console.tables import print_plan\n"
        "from surgery.run.dry_run import dry_run\n"
        "from surgery.recipe import load_recipe\n"
        "path = Path(sys.argv[1]); began = time.process_time()\n"
        "found = dry_run(load_recipe(path), Path('runs/x'), path); print_plan(found)\n"
        "found |= {'seconds': time.process_time() - began}\n"
        "found |= {'gib': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}\n"
        "print(json.dumps(found, default=str))\n"
    )
    done = library().start(["-c", str(RECIPES[name])], tmp_path, script=code).wait(SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert_complete(found, load_recipe(RECIPES[name]))
    assert found["seconds"] < 60 and found["gib"] < GIB
    assert found["fits"]["fits"], f"{name} does not fit its own hardware"
    assert not list(tmp_path.iterdir())
    for word in (
        "new parameters",
        "trainable parameters",
        "FLOPs",
        "activations",
        "GiB left",
        "128k tokens",
        "locating",
        "scan by",
    ):
        assert word in done.stdout


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


@pytest.mark.parametrize("model", ["./mamba2-130m", "../mamba2-130m", "a/b/mamba2-130m", "no folder", "mamba2-130m"])
def test_only_a_hub_id_takes_its_shapes_from_the_kept_configs(model: str, tmp_path: Path) -> None:
    path = RECIPES["mamba2-130m"]
    with pytest.raises(ModelError, match=r"base\.model"):
        dry_run(load_recipe(path, [f"base.model={model}"]), tmp_path / "x", path)


def test_mamba_ssm_configs_have_no_model_type() -> None:
    """They are kept as they are published, and only this project's reading of them makes them transformers'."""
    plain = json.loads((kept("mamba2-130m") / "config.json").read_text())
    assert "model_type" not in plain and plain["ssm_cfg"] == {"layer": "Mamba2"}
    with pytest.raises(ValueError, match="model_type"):
        AutoConfig.from_pretrained(str(kept("mamba2-130m")))
