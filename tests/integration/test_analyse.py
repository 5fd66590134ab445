"""Whole analyses: of tiny models with every procedure, interrupted and taken up again; of the shipped model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surgery.errors import RecipeError
from surgery.recipe import AnalysisRecipe, check_recipe, load_recipe
from surgery.run import analysis as analysing
from surgery.run.analysis import analyse
from tests.integration.conftest import ROOT, ran
from tests.support.pico import pico_family, pico_tokenizer

SMALL = {"pairs": [4, 6], "examples": 6, "sentences": 4}
FIGURES = ("accuracy_by_pairs", "tasks_by_arm", "prune", "drop_one", "disable_one", "swap_one")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A Llamba, a Llama of the same width, a hybrid with attention, each beside the tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("llamba", "llama", "zamba2"):
        pico_family(name, vocab_size=len(pico_tokenizer()) + 8).save_pretrained(folder / name)
        pico_tokenizer().save_pretrained(folder / name)
    return {name: str(folder / name) for name in ("llamba", "llama", "zamba2")}


def every_procedure(models: dict[str, str]) -> AnalysisRecipe:
    """The sweeps on a model of three layers, and changes beside them."""
    sweeps = [{"kind": "prune"}, {"kind": "drop_one", "layers": "minimal"}, {"kind": "disable_one", "top": 2},
              {"kind": "swap_one", "with_block": True}]  # fmt: skip
    changes = [{"name": "off", "disable": ["L1H2"]}, {"name": "alone", "keep": ["L0H1"]},
               {"name": "swapped", "swap": {"layer": 0, "teacher_layer": 2}}]  # fmt: skip
    parts = {"sweeps": sweeps, "changes": changes, "teacher": {"model": models["llama"]}, "evaluate": SMALL}
    return check_recipe({"name": "x", "base": {"model": models["llamba"]}, **parts}, AnalysisRecipe)


@pytest.fixture(scope="module")
def finished(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Every procedure, in one go."""
    folder = tmp_path_factory.mktemp("finished") / "x"
    return folder, analyse(every_procedure(models), folder)


def test_every_arm_is_there_and_drawn(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, found = finished
    minimal = found["minimal"]["layers"]
    dropped = [f"drop_{i:02d}" for i in range(minimal)]
    named = ["base", "prune_02", "prune_01", "off", "alone", "swapped"]
    rest = [*dropped, "disable_l0h0", "disable_l0h1", "swap_00", "swap_01", "swap_02"]
    assert list(found["arms"]) == list(found["tasks"]) == [*named, *rest]
    assert json.loads((folder / "analysis.json").read_text()) == json.loads(json.dumps(found))
    written = {path.name for path in (folder / "figures").iterdir()}
    assert written == {f"{stem}.{suffix}" for stem in FIGURES for suffix in ("png", "svg", "csv")}


def test_changes_change_something(finished: tuple[Path, dict[str, Any]]) -> None:
    """And a swap with the teacher's norms and MLP is another one than without."""
    perplexity = {name: tasks["perplexity"] for name, tasks in finished[1]["tasks"].items()}
    assert len(set(perplexity.values())) == len(perplexity)


def test_an_interrupted_analysis_goes_on(
    models: dict[str, str], finished: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, scored, real = every_procedure(models), [], analysing.evaluate_model

    def until(count: int) -> None:
        def evaluate(*args: Any) -> Any:
            if len(scored) == count:
                raise KeyboardInterrupt
            scored.append(1)
            return real(*args)

        monkeypatch.setattr(analysing, "evaluate_model", evaluate)

    until(5)
    with pytest.raises(KeyboardInterrupt):
        analyse(recipe, tmp_path / "x")
    assert not (tmp_path / "x" / "analysis.json").exists()
    until(-1)
    found = analyse(recipe, tmp_path / "x")
    assert found == finished[1] and len(scored) == len(found["arms"])
    with pytest.raises(RecipeError, match="finished analysis"):
        analyse(recipe, tmp_path / "x")
    # Another seed is another analysis; what is changed may be changed in between, and arms that stay are kept.
    (tmp_path / "x" / "analysis.json").unlink()
    with pytest.raises(RecipeError, match="something else"):
        analyse(recipe.model_copy(update={"seed": 1}), tmp_path / "x")
    fewer = recipe.model_copy(update={"sweeps": recipe.sweeps[:1], "margin": 0.5})
    scored.clear()
    assert list(analyse(fewer, tmp_path / "x")["arms"]) == list(found["arms"])[:6] and scored == []


def test_the_last_row_of_a_hybrid_is_masked(models: dict[str, str], tmp_path: Path) -> None:
    parts = {"changes": [{"name": "masked", "mask_last_row": True, "layers": 3}], "evaluate": SMALL}
    recipe = check_recipe({"name": "x", "base": {"model": models["zamba2"]}, **parts}, AnalysisRecipe)
    found = analyse(recipe, tmp_path / "x")
    assert list(found["arms"]) == ["base", "masked"] and found["minimal"] is None and found["sweeps"] == {}


def test_the_shipped_model_is_analysed(tmp_path: Path) -> None:
    """As its recipe says, with a few prompts: the arms and the table are those of the full one."""
    path = ROOT / "recipes" / "pico-reproduce.yaml"
    small = ["evaluate.pairs=[8]", "evaluate.examples=4", "evaluate.sentences=2"]
    small.append("sweeps=[{kind: prune}]")  # heads.json is named from the repository's root
    recipe = load_recipe(path, (), AnalysisRecipe)
    model = f"base.model={ROOT / recipe.base.model}"
    done = ran("analyse", str(path), model, *small, cwd=tmp_path)
    found = json.loads((tmp_path / "runs" / "pico-reproduce" / "analysis.json").read_text())
    assert {change.name for change in recipe.changes} < set(found["arms"])
    assert all(word in done.stdout for word in (*found["arms"], "chance", "perplexity", "Holm"))
    assert ("minimal model" in done.stdout) == (found["minimal"] is not None)
