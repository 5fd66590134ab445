"""The teacher as an arm: scored on the same prompts where its tokenizer is the base's, and the gap it opens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from accelerate import Accelerator

from surgery.recipe import check_recipe
from surgery.recipe.yaml import read_mapping
from surgery.run.context import Run
from surgery.run.evaluate_stage import _teacher_arm
from tests.integration.conftest import BASE, RECIPE, SMALL, run_small
from tests.support.pico import pico_family

DISTILS = ("train.sources.0.weights.distil=1.0",)


def run_of(teacher: Path, folder: Path) -> Run:
    overrides = [*SMALL, *DISTILS, f"train.teacher.model={teacher}"]
    return Run(check_recipe(read_mapping(RECIPE, overrides)), folder, Accelerator(cpu=True))


def test_a_teacher_with_other_tokens_is_no_arm(tmp_path: Path) -> None:
    other = tmp_path / "other"
    pico_family("llama", vocab_size=1024).save_pretrained(other)
    shutil.copy(BASE / "tokenizer_config.json", other)
    tokens = json.loads((BASE / "tokenizer.json").read_text())
    tokens["added_tokens"].append({**tokens["added_tokens"][0], "id": 1023, "content": "<|another|>"})
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    found, skipped = _teacher_arm(run_of(other, tmp_path / "run"))
    assert found == {} and "tokenizer" in skipped["teacher"]


def test_with_a_teacher_results_say_what_of_the_gap_is_closed(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "quickstart"
    shutil.copytree(finished, run)
    done = run_small(tmp_path, *DISTILS, f"train.teacher.model={BASE}", "train.steps=2", options=("--to", "evaluate"))
    assert done.returncode == 0, done.stderr
    results = json.loads((run / "results.json").read_text())
    assert list(results["arms"]) == ["base", "no_splice", "hybrid_heads_off", "hybrid", "teacher"]
    assert results["arms"]["teacher"] == results["arms"]["base"]  # it is the same model
    assert set(results["gap_closed"]) == set(results["comparisons"]["hybrid"]["base"])
    for entry in results["gap_closed"].values():
        assert (entry["value"] is None) == ("reason" in entry)
    assert results["comparisons"]["hybrid"]["teacher"].keys() == results["gap_closed"].keys()


def test_without_one_there_is_no_gap(finished: Path) -> None:
    results = json.loads((finished / "results.json").read_text())
    assert "gap_closed" not in results and "skipped" not in results
    assert list(results["comparisons"]["hybrid"]) == ["base", "no_splice", "hybrid_heads_off"]
