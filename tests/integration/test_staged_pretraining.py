"""A pretraining in stages that was interrupted, and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from surgery.files.atomic import read_json
from surgery.recipe import PretrainRecipe, check_recipe
from surgery.run.pretrain import pretrain


def test_it_keeps_its_scores(tmp_path: Path) -> None:
    source = {"task": "key_echo", "pairs": [2, 2], "rows": 1, "weights": {"answer": 1.0}}
    stages = [{"name": name, "steps": 2, "sources": [source]} for name in ("near", "far")]
    given = {
        "name": "staged",
        "model": {"hidden_size": 32, "num_hidden_layers": 1, "head_dim": 32, "state_size": 4, "vocab_size": 1024},
        "train": {"stages": stages, "save_every": 1, "control": False},
        "evaluate": {"tasks": [{"task": "kv_retrieval", "pairs": [2]}], "examples": 2},
    }
    recipe = check_recipe(given, PretrainRecipe)

    def stop(step: int, total: int, note: str) -> None:
        if step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pretrain(recipe, tmp_path / "made", stop)
    pretrain(recipe, tmp_path / "made")
    assert sorted(read_json(tmp_path / "made" / "scores.json")) == ["1", "2", "3", "4"]
