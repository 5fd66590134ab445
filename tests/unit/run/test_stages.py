"""Stages read files of the run folder that people may edit."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from surgery.errors import RunError
from surgery.files.atomic import write_json
from surgery.recipe import load_recipe
from surgery.run import stages
from tests.integration.conftest import RECIPE


@pytest.mark.parametrize("results", [{"arms": {"base": 3}}, {"arms": []}, [], 3, {}])
def test_results_of_another_form_are_named(tmp_path: Path, results: Any) -> None:
    write_json(tmp_path / "results.json", results)
    run: Any = SimpleNamespace(folder=tmp_path, recipe=load_recipe(RECIPE), heads=lambda: None, plan=lambda: None)
    with pytest.raises(RunError, match=r"results\.json.*run the stage evaluate"):
        stages._export(run, "key")
