"""What `surgery validate` checks without weights. tests/integration/test_validate.py runs the command."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from surgery.errors import ModelError, RecipeError, RunError
from surgery.recipe import Recipe, check_recipe
from surgery.run.context import Run
from surgery.run.pipeline import check_inputs
from surgery.run.stages import choose_stages
from surgery.run.without_weights import check_installed, check_without_weights
from surgery.train.training import make_accelerator
from tests.support.pico import pico_base, pico_tokenizer


def test_a_missing_bitsandbytes_is_refused_as_by_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("surgery.train.quantization.version", missing)
    train = {"trainable": "lora", "lora": {"quantization": "nf4"}}
    with pytest.raises(RecipeError, match=r"train\.lora\.quantization: nf4.*pip install bitsandbytes"):
        check_installed(check_recipe({"name": "x", "base": {"model": "owner/name"}, "train": train}))


def test_a_missing_tracker_is_refused_as_by_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surgery.train.tracking.find_spec", lambda name: None)
    recipe = check_recipe({"name": "x", "base": {"model": "owner/name"}, "train": {"trackers": ["wandb"]}})
    with pytest.raises(RecipeError, match=r"train\.trackers: wandb.*pip install wandb"):
        check_installed(recipe)
    run = Run(recipe, Path("x"), make_accelerator(), stages=("train",))
    monkeypatch.setattr("surgery.run.train_stages.TrainStage.check_configs", lambda self, run: None)
    with pytest.raises(RecipeError, match=r"train\.trackers"):
        check_inputs(run)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"train": {"teacher": {"model": "./nothing"}, "sources": [{"task": "records", "weights": {"distil": 1.0}}]}},
         "train.teacher.model"),
        ({"splice": {"init": "teacher", "teacher": {"model": "./nothing"}}}, "splice.teacher.model"),
    ],
)  # fmt: skip
def test_a_missing_teacher_is_named_by_its_key(given: dict[str, Any], field: str, tmp_path: Path) -> None:
    pico_base(vocab_size=len(pico_tokenizer())).save_pretrained(tmp_path / "base")
    pico_tokenizer().save_pretrained(tmp_path / "base")
    recipe = check_recipe({"name": "x", "base": {"model": str(tmp_path / "base")}, **given}, Recipe)
    with pytest.raises(ModelError, match="There is no such folder") as error:
        check_without_weights(recipe)
    assert error.value.field == field


def test_a_tokenizer_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    pico_base(vocab_size=len(pico_tokenizer())).save_pretrained(tmp_path / "base")
    pico_tokenizer().save_pretrained(tmp_path / "base")
    base = {"model": str(tmp_path / "base"), "tokenizer": str(tmp_path / "nothing")}
    with pytest.raises(ModelError, match=r"base\.tokenizer: .*nothing.* There is no such folder"):
        check_without_weights(check_recipe({"name": "x", "base": base}, Recipe))
    hub = check_recipe({"name": "x", "base": {**base, "tokenizer": "owner/none"}}, Recipe)
    assert any("owner/none" in line for line in check_without_weights(hub))


def test_stages_are_named_in_order() -> None:
    recipe = check_recipe({"name": "x", "base": {"model": "owner/name"}}, Recipe)
    assert [stage.name for stage in choose_stages(recipe, "plan", "train")] == ["plan", "splice", "train"]
    assert len(choose_stages(recipe, None, None)) == 7
    for first, last, says in (
        ("trian", None, "--from: trian"),
        (None, "no", "--to: no"),
        ("train", "plan", "before train"),
    ):
        with pytest.raises(RunError, match=says):
            choose_stages(recipe, first, last)


def test_targets_of_lora_are_checked_before_anything_is_measured(tmp_path: Path) -> None:
    pico_base(vocab_size=len(pico_tokenizer())).save_pretrained(tmp_path / "base")
    pico_tokenizer().save_pretrained(tmp_path / "base")
    train = {"trainable": "lora", "lora": {"targets": ["in_porj"]}}
    recipe = check_recipe({"name": "x", "base": {"model": str(tmp_path / "base")}, "train": train}, Recipe)
    with pytest.raises(RecipeError, match=r"train\.lora\.targets: in_porj\. No linear layer has .* Use one of in_proj"):
        check_without_weights(recipe)
