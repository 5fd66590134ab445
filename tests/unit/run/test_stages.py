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


def test_keys_of_stages_know_the_form_of_located_prompts_only_where_it_is_set(tmp_path: Path) -> None:
    """A recipe without `locate.filler` keeps its finished stages."""
    recipe = load_recipe(RECIPE)
    for name in ("heads.json", "plan.json", "spliced", "trained", "no_splice", "results.json", "report.html"):
        (tmp_path / name).write_text(name)

    def keys(**locate: Any) -> dict[str, str]:
        given = recipe.model_copy(update={"locate": recipe.locate.model_copy(update=locate)})
        run: Any = SimpleNamespace(recipe=given, revision="r", control_revision="", data_revision="", folder=tmp_path)
        return {stage.name: stage.key(run) for stage in stages.stages_of(given)}

    plain = keys()
    assert plain == keys(filler=None, value_digits=None)
    for more in ({"filler": (1, 2)}, {"value_digits": (3, 4)}):
        changed = keys(**more)
        assert {name for name in plain if changed[name] != plain[name]} == {"locate", "evaluate", "export"}
