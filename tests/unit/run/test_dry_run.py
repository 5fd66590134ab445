"""A dry run refuses what the run would refuse. tests/unit/run/test_time_estimate.py has its estimates."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from surgery.errors import PlanError
from surgery.recipe import check_recipe
from surgery.run.dry_run import dry_run
from tests.support.pico import pico_base, pico_tokenizer


def test_a_model_without_a_splice_is_no_hybrid_to_train(tmp_path: Path) -> None:
    pico_base(vocab_size=1024, layers=2).save_pretrained(tmp_path / "base")
    pico_tokenizer().save_pretrained(tmp_path / "base")
    recipe = check_recipe({"name": "r", "base": {"model": str(tmp_path / "base")}, "splice": None})
    with pytest.raises(PlanError, match=r"base\.model: .*Nothing is spliced into this model\. Use a hybrid"):
        dry_run(recipe, tmp_path / "r")


def test_what_a_run_refuses_is_refused(tmp_path: Path) -> None:
    """The stand-in for heads that are not located would be cut to the heads that there are."""
    pico_base(vocab_size=1024, layers=2).save_pretrained(tmp_path / "base")
    pico_tokenizer().save_pretrained(tmp_path / "base")
    recipe = check_recipe({"name": "r", "base": {"model": str(tmp_path / "base")}, "splice": {"num_heads": 9}})
    with pytest.raises(PlanError, match=r"splice\.num_heads: 9\. The model has only 8 heads"):
        dry_run(recipe, tmp_path / "r")


def test_a_run_in_4_bits_is_estimated_without_bitsandbytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe may be for another machine."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("surgery.train.quantization.version", missing)
    pico_base(vocab_size=1024, layers=2).save_pretrained(tmp_path / "base")
    pico_tokenizer().save_pretrained(tmp_path / "base")
    train = {"trainable": "lora", "lora": {"quantization": "nf4"}}
    recipe = check_recipe({"name": "r", "base": {"model": str(tmp_path / "base")}, "train": train})
    assert dry_run(recipe, tmp_path / "r")["trainable_parameters"] > 0
