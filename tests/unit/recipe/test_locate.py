"""The schema of locating: own prompts as a path alone."""

from __future__ import annotations

from pathlib import Path

from surgery.recipe import Data, Locate, load_recipe


def test_a_path_alone_is_own_prompts_whose_places_are_found(tmp_path: Path) -> None:
    expected = Data(path="my.jsonl", columns={"answer_span": "auto"})
    assert Locate.model_validate({"data": "my.jsonl"}).data == expected
    file = tmp_path / "my.yaml"
    file.write_text("name: x\nbase: {model: some/folder}\n")
    assert load_recipe(file, ["locate.data=my.jsonl", "locate.generated=4"]).locate.data == expected
