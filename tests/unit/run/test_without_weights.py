"""What `surgery validate` checks without weights. tests/integration/test_validate.py runs the command."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from surgery.errors import RecipeError
from surgery.recipe import check_recipe
from surgery.run.without_weights import check_installed


def test_a_missing_bitsandbytes_is_refused_as_by_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("surgery.train.quantization.version", missing)
    train = {"trainable": "lora", "lora": {"quantization": "nf4"}}
    with pytest.raises(RecipeError, match=r"train\.lora\.quantization: nf4.*pip install bitsandbytes"):
        check_installed(check_recipe({"name": "x", "base": {"model": "owner/name"}, "train": train}))
