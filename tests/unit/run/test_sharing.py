"""Which stages the runs of a sweep share: equal keys alone, and heads that are chosen again from the same scores."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from surgery.files.atomic import copy_entry, write_json
from surgery.files.ownership import mark
from surgery.locate.selection import can_choose_again, choose_again
from surgery.recipe import Locate, Recipe, Splice, check_recipe, to_yaml
from surgery.run.context import Run
from surgery.run.pipeline import STAGES
from surgery.run.sharing import find_origin, origin_text, take_stage
from surgery.run.stage import Stage
from surgery.types import HeadId, HeadSet, Interval, MixerSpec, ScoredHead, to_json

BY_NAME = {stage.name: stage for stage in STAGES}
SHARPEN = {"select": "sharpen"}
SPEC = MixerSpec(0, "layers.0", "mamba2", 6, 4, 1, 4)


def recipe(*, trainable: str = "all", locate: dict[str, Any] | None = None, seed: int = 0, **splice: Any) -> Recipe:
    source = {"task": "kv_retrieval", "rows": 1, "weights": {"answer": 1.0}}
    train = {"steps": 2, "sources": [source], "trainable": trainable}
    data = {"name": "t", "seed": seed, "base": {"model": "m"}, "train": train, "splice": splice, "locate": locate or {}}
    return check_recipe(data, Recipe)


def run(folder: Path, made: Recipe, *siblings: Path) -> Run:
    new = Run(made, folder, SimpleNamespace(), siblings=siblings)  # type: ignore[arg-type]
    new.__dict__["revision"] = "r"  # of the base, which does not exist
    return new


def finish(new: Run, stage: Stage, text: str = "x") -> str:
    """Write outputs and the manifest of a stage, as if it had run."""
    key = stage.key(new)
    for output in (new.folder / name for name in stage.outputs(new.recipe)):
        if output.suffix in (".json", ".csv", ".html"):
            write_json(output, text)
        else:
            output.mkdir(parents=True)
            (output / "model.safetensors").write_text(text)
            (output / "config.json").write_text(text)
    new.rundir.finish(stage.name, key, stage.outputs(new.recipe), 7.5)
    (new.folder / "recipe.yaml").write_text(to_yaml(new.recipe))
    mark(new.folder, "run")
    return key


def head_set(select: str, chosen: int) -> HeadSet:
    """Six heads of one layer, whose oracle reads gain less and less."""
    scores = [{"segment_end": Interval(6.0 - i, 0, 9, 8), "ablation": Interval(float(i), 0, 9, 8)} for i in range(6)]
    heads = tuple(ScoredHead(HeadId(0, i), "neither", "segment_end", scores[i]) for i in range(6))
    return HeadSet("m", "r", "g", heads, heads[:chosen], select, 0, {"accuracy": Interval(0.8, 0.7, 0.9, 8)})


def test_a_finished_stage_is_taken_with_its_time_and_adapters(tmp_path: Path) -> None:
    for number, (name, trainable) in enumerate((("control", "all"), ("train", "lora"), ("train", "all"))):
        stage, folder = BY_NAME[name], tmp_path / str(number)
        key = finish(run(folder / "a", recipe(num_heads=1, trainable=trainable)), stage)
        adapters = Path("adapters") / "adapter_config.json"
        write_json(folder / ("a" if trainable == "lora" else "b") / adapters, {"r": 8})
        new = run(folder / "b", recipe(num_heads=4 if name == "control" else 1, trainable=trainable), folder / "a")
        origin = find_origin(new, stage, stage.key(new))
        assert origin is not None and origin_text(*origin) == "copied from a"
        take_stage(new, stage, key, *origin)
        assert new.rundir.is_fresh(name, key, stage.outputs(new.recipe))
        manifest = json.loads((folder / "b" / ".stages" / f"{name}.json").read_text())
        assert (manifest["seconds"], manifest["origin"]) == (7.5, "copied from a")
        assert name == "control" or (folder / "b" / adapters).is_file() == (trainable == "lora")


def test_what_is_not_the_same_or_not_finished_is_not_taken(tmp_path: Path) -> None:
    for number, change in enumerate(("seed", "edited", "evaluate", "unfinished")):
        stage = BY_NAME["evaluate" if change == "evaluate" else "control"]
        folder = tmp_path / str(number)
        other = run(folder / "a", recipe())
        finish(other, stage)
        if change == "edited":
            (folder / "a" / "no_splice" / "config.json").write_text("y")
        if change == "unfinished":
            other.rundir.forget(stage.name)
        new = run(folder / "b", recipe(seed=1 if change == "seed" else 0), folder / "a")
        assert find_origin(new, stage, stage.key(new)) is None, change
    control, made = BY_NAME["control"], recipe(trainable="new_heads")  # there is none
    finish(run(tmp_path / "a", made), control)
    new = run(tmp_path / "b", made, tmp_path / "a")
    assert control.outputs(made) == () and find_origin(new, control, control.key(new)) is None


def test_a_run_that_this_sweep_cannot_read_is_passed_over(tmp_path: Path) -> None:
    made, stage = recipe(**SHARPEN, num_heads=1), BY_NAME["locate"]
    finish(run(tmp_path / "a", made), stage)
    text = (tmp_path / "a" / "recipe.yaml").read_text().replace("select: sharpen", "select: of_a_plugin")
    (tmp_path / "a" / "recipe.yaml").write_text(text)
    new = run(tmp_path / "b", recipe(num_heads=1), tmp_path / "a")
    assert "of_a_plugin" in text and find_origin(new, stage, stage.key(new)) is None


def test_heads_are_chosen_again_only_where_nothing_new_is_measured(tmp_path: Path) -> None:
    stage, ablation = BY_NAME["locate"], {"select": "ablation"}
    for number, (measured, wanted, again) in enumerate((
        ({**SHARPEN, "num_heads": 4}, {**SHARPEN, "num_heads": 2}, True),
        ({**SHARPEN, "num_heads": 2}, {**SHARPEN, "num_heads": 4}, False),  # greedy: the third is not measured
        ({"num_heads": 2}, {"num_heads": 4}, True),
        ({**SHARPEN, "num_heads": 1}, {"num_heads": 4}, True),
        ({"num_heads": 4}, {**SHARPEN, "num_heads": 2}, False),
        ({**SHARPEN, "num_heads": 4}, {**ablation, "num_heads": 2}, True),
        ({**ablation, "num_heads": 4}, {**SHARPEN, "num_heads": 2}, False),
        ({**ablation, "num_heads": 4}, {**SHARPEN, "num_heads": 1}, True),
        ({**SHARPEN, "num_heads": 4}, {"select": "random", "num_heads": 5}, True),
        ({"select": "random", "num_heads": 4}, {"num_heads": 1}, False),  # the base's accuracy was not checked
    )):  # fmt: skip
        case = (measured, wanted)
        assert can_choose_again(Splice(**measured), Splice(**wanted)) == again, case
        folder = tmp_path / str(number)
        finish(run(folder / "a", recipe(**measured)), stage)
        new = run(folder / "b", recipe(**wanted), folder / "a")
        origin = find_origin(new, stage, stage.key(new))
        assert (origin is not None and origin_text(*origin) == "scores from a") == again, case
        elsewhere = run(folder / "c", recipe(locate={"pairs": 5}, **wanted), folder / "a")
        assert find_origin(elsewhere, stage, stage.key(elsewhere)) is None, "another measurement"


def test_a_choice_from_scores_equals_that_of_a_measurement() -> None:
    greedy = head_set("sharpen", 4)
    two = choose_again(greedy, [SPEC], Splice(select="sharpen", num_heads=2), Locate(), 0)
    assert two == head_set("sharpen", 2)
    ablated = choose_again(greedy, [SPEC], Splice(select="ablation", num_heads=3), Locate(), 0)
    assert [s.head.head for s in ablated.heads] == [5, 4, 3, 2, 1, 0]
    assert [s.head.head for s in ablated.chosen] == [5, 4, 3] and ablated.method == "ablation"
    listed = choose_again(greedy, [SPEC], Splice(select="list", heads=("L0H3",)), Locate(), 0)
    assert [str(s.head) for s in listed.chosen] == ["L0H3"]
    one = choose_again(two, [SPEC], Splice(select="sharpen", num_heads=1), Locate(), 0)
    assert to_json(one) == to_json(head_set("sharpen", 1))


def test_weights_are_linked_where_links_are_supported_and_other_files_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    for name in ("model.safetensors", "config.json"):
        (tmp_path / "a" / name).write_text(name)
    for target, linked in (("b", True), ("c", False)):
        (tmp_path / target).mkdir()
        (tmp_path / target / "old").write_text("old")
        if not linked:
            monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError))
        copy_entry(tmp_path / "a", tmp_path / target)
        same = {path.name: path.samefile(tmp_path / "a" / path.name) for path in (tmp_path / target).iterdir()}
        assert same == {"model.safetensors": linked, "config.json": False}
        assert (tmp_path / target / "model.safetensors").read_text() == "model.safetensors"
    assert not list(tmp_path.rglob("*.tmp"))
