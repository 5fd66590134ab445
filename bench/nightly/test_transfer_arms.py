"""Transfer between formats: what the arms are, and a run that is interrupted and goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.studies.site_selection.arms import Budget
from bench.studies.transfer.arms import TRAINED, Experiment, arm_of, asked, collected, located, pooled, run, table
from surgery.files.atomic import read_json
from surgery.models.loading import load_model
from surgery.recipe import Base, PretrainRecipe, load_recipe
from tests.integration.conftest import PICO_MAMBA2 as BASE
from tests.support.pico import pico_tokenizer

RECIPE = Path(__file__).parents[2] / "bench" / "studies" / "transfer" / "base.yaml"
TOY = Budget(steps=2, warmup=1, rows=4, keep_rows=2, pairs=(8, 12), locate_pairs=16, locate_examples=32)


@pytest.fixture
def toy(tmp_path: Path) -> Experiment:
    return Experiment(BASE, tmp_path, (0,), 4, TOY)


def test_the_base_is_trained_on_every_format_that_is_asked(toy: Experiment) -> None:
    stages = load_recipe(RECIPE, (), PretrainRecipe).train.sequence
    taught = {source.task for stage in stages for source in stage.sources}
    formats = {s.task for s in toy.section("formats", True).sources if s.weights.uses("answer")}
    names = {task.name.split(",")[0] for task in asked(pico_tokenizer(), 1)}
    assert names == formats <= taught
    assert {s.task for s in toy.section("kv", True).sources if s.weights.uses("answer")} == {"kv_retrieval"}
    assert {s.task for s in toy.section("phonebook", True).sources if s.weights.uses("answer")} == {"phonebook"}
    assert "attention" in toy.section("formats", True).objectives
    assert "attention" not in toy.section("formats", False).objectives


def test_sites_are_the_chosen_head_and_another(toy: Experiment) -> None:
    heads = located(toy, load_model(Base(model=str(BASE))), pico_tokenizer(), 0)
    chosen, other = (arm_of(heads, "kv", site, 0) for site in ("chosen", "other"))
    assert chosen.heads == ("L0H1",) and other.heads != chosen.heads and len(other.heads) == 1
    assert arm_of(heads, "kv", "none", 0).heads == () and arm_of(heads, "kv", "none", 0).kind == "none"
    assert arm_of(heads, "formats", "other", 0).heads == other.heads, "all trainings have one rival"
    assert arm_of(heads, "phonebook", "chosen", 0).reads == ("answer_token",)


def test_a_run_goes_on_with_the_arms_that_are_missing(toy: Experiment) -> None:
    assert run(toy, most=4) == 4
    first = toy.arm_file("kv", "none", 0)
    before, when = read_json(first), first.stat().st_mtime_ns
    assert run(toy) == 5 and run(toy) == 0 and first.stat().st_mtime_ns == when
    arms = collected(toy)
    assert len(pooled(arms["kv", "chosen"], "mqar/8", [0])) == 4 and len(before["correct"]) == 9
    assert 0 < read_json(toy.arm_file("kv", "chosen", 0))["on_gold"]["kv_retrieval/8"] < 1
    rows = list(table(toy))
    assert len(rows) == len(TRAINED) * 11 and all(row.count("|") in (0, 10) for row in rows)
    assert run(replace(toy, budget=replace(TOY, lr=1e-3)), most=1) == 1, "another budget is another arm"
