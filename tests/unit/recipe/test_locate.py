"""The schema of locating: own prompts as a path alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from surgery.recipe import Data, Locate, load_recipe


def test_a_path_alone_is_own_prompts_whose_places_are_found(tmp_path: Path) -> None:
    expected = Data(path="my.jsonl", columns={"answer_span": "auto"})
    assert Locate.model_validate({"data": "my.jsonl"}).data == expected
    file = tmp_path / "my.yaml"
    file.write_text("name: x\nbase: {model: some/folder}\n")
    assert load_recipe(file, ["locate.data=my.jsonl", "locate.generated=4"]).locate.data == expected


def test_a_recipe_of_an_earlier_export_is_read() -> None:
    """It holds the defaults of what has moved to plugins."""
    moved = {"gates": {"steps": 100}, "trial": {"steps": 40}}
    assert Locate.model_validate({"pairs": 8, "backups": 0, **moved}) == Locate(pairs=8)
    for used in ({"backups": 2, **moved}, {"gates": moved["gates"]}):
        with pytest.raises(ValidationError, match="Extra inputs"):
            Locate.model_validate(used)
