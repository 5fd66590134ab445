"""The trained pair of the serving tests is that of paper/INSERTED.md."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from bench.studies.inserted.study import Arm
from surgery.recipe import Train
from surgery.recipe.loading import load_recipe

ROOT = Path(__file__).resolve().parents[2]


def test_the_recipe_is_the_documented_one() -> None:
    path = ROOT / "integrations/pair.yaml"
    recipe = load_recipe(path)
    documented, apart = re.findall(r"```yaml\n(.*?)```", (ROOT / "paper/INSERTED.md").read_text(encoding="utf-8"), re.S)
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    for name, section in yaml.safe_load(documented).items():
        assert {key: written[name][key] for key in section} == section, name
    assert Train.model_validate(yaml.safe_load(apart)["train"]) == Arm("far", "pair-copies-longer", 0).train
    assert (recipe.name, recipe.export.format, recipe.train.control) == ("served-pair", "nemotron_h", False)
