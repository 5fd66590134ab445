"""Bad input: one clear line, exit code 2, no traceback, nothing half-written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.integration.conftest import BASE, RECIPE, SMALL, run_small, surgery


def assert_refused(done, *words: str) -> None:
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    for word in words:
        assert word in lines[0], lines[0]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.stepz=3", ("train.stepz", "not known")),
        ("train.steps=many", ("train.steps", "many")),
        ("splice.mode=subtract", ("splice.mode", "subtract", "add")),
        ("locate.pairs=200", ("locate.pairs", "200", "100")),
        ("train.optimizer.betas=[1.5, 0.9]", ("betas", "1.5")),
        ("train.steps=true", ("train.steps", "True")),
        ("splice.num_heads=99", ("splice.num_heads", "99", "32 heads")),
        ("evaluate.tasks=[kv_retrieval, {task: needle_single, tokens: [9]}]", ("tokens", "9")),
        ("nonsense", ("nonsense", "key.path=value")),
        ("base.model=no/such/folder", ("base.model", "no/such/folder", "no such folder")),
    ],
)
def test_bad_values(tmp_path: Path, override: str, words: tuple[str, ...]) -> None:
    assert_refused(run_small(tmp_path, override), *words)
    assert not (tmp_path / "runs").exists()


def test_a_duplicate_key(tmp_path: Path) -> None:
    recipe = tmp_path / "twice.yaml"
    recipe.write_text(RECIPE.read_text() + "\nseed: 1\n")
    assert_refused(surgery("validate", str(recipe), cwd=tmp_path), "duplicate key", "seed")


def test_an_empty_model_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert_refused(surgery("inspect", "./empty", cwd=tmp_path), "config.json")
    assert_refused(run_small(tmp_path, "base.model=./empty"), "config.json")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("kind", "nearest"), [("bert", "mamba2"), ("jamba", "nearest is mamba"), ("zamba9", "zamba2")])
def test_a_model_of_another_kind(tmp_path: Path, kind: str, nearest: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({"model_type": kind, "hidden_size": 32}))
    assert_refused(surgery("inspect", "./other", cwd=tmp_path), kind, nearest, "surgery/families/models.py")


@pytest.fixture
def base_copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BASE, tmp_path / "base"))


def test_truncated_weights(base_copy: Path, tmp_path: Path) -> None:
    file = base_copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert_refused(run_small(tmp_path, "base.model=./base"), "model.safetensors", "header says")
    assert not (tmp_path / "runs").exists()


def test_renamed_and_misshapen_tensors(base_copy: Path, tmp_path: Path) -> None:
    file = base_copy / "model.safetensors"
    weights = load_file(file)
    weights["backbone.layers.0.mixer.in_projection.weight"] = weights.pop("backbone.layers.0.mixer.in_proj.weight")
    weights["backbone.layers.1.mixer.D"] = weights["backbone.layers.1.mixer.D"][:3].clone()
    save_file(weights, file, metadata={"format": "pt"})
    done = run_small(tmp_path, "base.model=./base")
    assert_refused(done, "missing", "in_proj.weight", "unexpected", "in_projection", "misshapen", "(3,)")


def test_a_head_out_of_range(tmp_path: Path) -> None:
    assert_refused(run_small(tmp_path, "splice.select=list", "splice.heads=[L9H0]"), "L9H0", "L0H0 to L3H7")
    assert not (tmp_path / "runs").exists()


def test_heads_of_another_geometry(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished.parent, tmp_path / "runs")
    file = tmp_path / "runs" / "quickstart" / "heads.json"
    heads = json.loads(file.read_text())
    file.write_text(json.dumps({**heads, "geometry": "0123456789abcdef"}))
    assert_refused(surgery("plan", str(RECIPE), *SMALL, cwd=tmp_path), "geometry", "0123456789abcdef", "Locate again")


def test_a_loss_that_is_not_a_number(tmp_path: Path) -> None:
    done = run_small(
        tmp_path,
        "train.optimizer.lr=1.0",
        "train.optimizer.new_heads_lr=1.0",
        "train.sources.0.weights.answer=1e38",
        "train.optimizer.warmup=0",
        "train.save_every=1",
        options=("--to", "train"),
    )
    assert_refused(done, "train step", "lr")
    assert not (tmp_path / "runs" / "quickstart" / "trained").exists()


def test_a_base_without_a_tokenizer(base_copy: Path, tmp_path: Path) -> None:
    for file in base_copy.glob("tokenizer*"):
        file.unlink()
    assert_refused(run_small(tmp_path, "base.model=./base"), "base.tokenizer", "no tokenizer")
    assert not (tmp_path / "runs").exists()


def test_stages_in_the_wrong_order(tmp_path: Path) -> None:
    assert_refused(run_small(tmp_path, options=("--from", "train", "--to", "splice")), "--to", "splice", "before train")


def test_an_unknown_stage(tmp_path: Path) -> None:
    assert_refused(run_small(tmp_path, options=("--to", "lunch")), "--to", "lunch", "locate")
