"""Order, failures and folders of a sweep, without computing any run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from surgery.errors import RunError, TrainingDiverged
from surgery.files.atomic import write_json
from surgery.files.ownership import kind_of, mark
from surgery.recipe.grid import load_grid
from surgery.run import recipe_sweep
from surgery.run.recipe_sweep import run_sweep
from tests.support.pico import pico_base, pico_tokenizer
from tests.unit.report.test_sweep_report import arm

SOURCE = {"task": "kv_retrieval", "rows": 2, "pairs": [2, 2], "weights": {"answer": 1.0}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    base = tmp_path / "base"
    pico_base(vocab_size=len(pico_tokenizer()), layers=2).save_pretrained(base)
    pico_tokenizer().save_pretrained(base)
    data = {"name": "tiny", "base": {"model": str(base)}, "train": {"steps": 2, "sources": [SOURCE]}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(data))
    return tmp_path / "tiny.yaml"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Replace runs by their results. Records each run with the siblings that it gets."""
    calls: list[tuple[str, list[str]]] = []

    def run(
        recipe: Any, folder: Path, first: Any, last: Any, over: Any, reporter: Any, file: Any, siblings: Any
    ) -> None:
        calls.append((folder.name, [sibling.name for sibling in siblings]))
        mark(folder, "run")
        if recipe.train.optimizer.lr == 1 or (recipe.name.startswith("wild1") and recipe.splice.num_heads == 1):
            raise TrainingDiverged("train", "step 1", "Lower the learning rate.")
        arms = {"no_splice": arm(20), "hybrid": arm(50 + recipe.splice.num_heads)}
        results = {"arms": arms, "heads": ["L0H0"]}
        if recipe.train.has_plateau:
            results["training"] = {s.name: {"steps": 5 + recipe.splice.num_heads} for s in recipe.train.sequence}
        write_json(folder / "results.json", results)
        for name in ("trained", "no_splice"):
            pico_base(layers=2).config.save_pretrained(folder / name)

    monkeypatch.setattr(recipe_sweep, "run_pipeline", run)
    return calls


def test_most_heads_first_and_later_runs_may_take_from_earlier_ones(path: Path, started: list[Any]) -> None:
    folder = path.parent / "s"
    summary = run_sweep(load_grid(path, ["splice.num_heads=0,1,2"]), folder)
    assert started == [("tiny-splice.num_heads-2", []), ("tiny-splice.num_heads-1", ["tiny-splice.num_heads-2"])]
    found = [point["accuracy"]["retrieval"]["value"] for point in summary["points"]]
    assert found == [pytest.approx(n / 150) for n in (30, 61, 62)]
    assert not any("steps" in point for point in summary["points"]), "all have the steps of the recipe"
    assert summary == json.loads((folder / "sweep.json").read_text()) and kind_of(folder) == "sweep"


def test_the_control_has_the_steps_of_the_hybrid_of_its_run(path: Path, started: list[Any]) -> None:
    """Each stage of the runs of 1 and 2 heads ended after 6 and 7 steps. The control has the second stage only."""
    ends = {"window": 1, "patience": 1, "min_steps": 1}
    stage = {"steps": 9, "sources": [SOURCE], "optimizer": {"schedule": "wsd", "warmup": 1}, "plateau": ends}
    stages = [{**stage, "name": "heads", "trainable": "new_heads"}, {**stage, "name": "all"}]
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "train": {"stages": stages}}))
    summary = run_sweep(load_grid(path, ["splice.num_heads=0,1,2"]), path.parent / "s")
    assert [point["steps"] for point in summary["points"]] == [6, 12, 14]


def test_a_run_that_diverges_does_not_stop_the_others(path: Path, started: list[Any]) -> None:
    folder = path.parent / "s"
    with pytest.raises(TrainingDiverged, match=r"1 of 3 runs diverged, such as tiny-train\.optimizer\.lr-1: .*Lower"):
        run_sweep(load_grid(path, ["train.optimizer.lr=0.1,1,0.01"]), folder)
    assert len(started) == 3
    summary = json.loads((folder / "sweep.json").read_text())
    assert [point["values"]["train.optimizer.lr"] for point in summary["points"]] == [0.1, 0.01]
    assert list(summary["diverged"]) == ["tiny-train.optimizer.lr-1"]

    with pytest.raises(TrainingDiverged, match="1 of 2 runs diverged"):  # the control of another run is read
        run_sweep(load_grid(path, ["splice.num_heads=0,1,2", "name=wild1"]), folder)
    points = json.loads((folder / "sweep.json").read_text())["points"]
    found = [(point["values"]["splice.num_heads"], point["run"]) for point in points]
    assert found == [(n, "wild1-splice.num_heads-2") for n in (0, 2)]


def test_equal_bases_are_loaded_once_for_the_checks(
    path: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    load = recipe_sweep.Run.base.__globals__["load_model"]
    counted = lambda base: (loaded.append(base.model), load(base))[1]  # noqa: E731
    monkeypatch.setitem(recipe_sweep.Run.base.__globals__, "load_model", counted)
    run_sweep(load_grid(path, ["seed=0,1,2"]), path.parent / "s")
    assert len(loaded) == 1


def test_a_run_of_another_recipe_in_its_folder_is_refused_before_any_run(path: Path, started: list[Any]) -> None:
    folder = path.parent / "s"
    other = folder / "tiny-seed-1"
    other.mkdir(parents=True)
    (other / "recipe.yaml").write_text("name: other\nseed: 5\n")
    mark(other, "run")
    mark(folder, "sweep")
    with pytest.raises(RunError, match="belongs to another recipe"):
        run_sweep(load_grid(path, ["seed=0,1"]), folder)
    assert started == []
