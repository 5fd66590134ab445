"""Analyses: sweeps written out, what a model has not is refused, and the minimal model is the last before a drop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from surgery.errors import RecipeError
from surgery.evaluate.evaluation import Arm
from surgery.models.lookup import family_of, geometry_of
from surgery.recipe import AnalysisRecipe, Change, Swap, Teacher, check_recipe
from surgery.run.analysis import minimal_model, side_by_side
from surgery.run.changes import check_change, expand, off_heads, swap_plan
from surgery.types import HeadId, HeadSet, ScoredHead, to_json
from tests.support.pico import pico_config, pico_family_config

TEACHER = Teacher(model="teacher")


def recipe(**parts: Any) -> AnalysisRecipe:
    return check_recipe({"name": "x", "base": {"model": "m"}, **parts}, AnalysisRecipe)


def arm(right: int, n: int = 200, perplexity: float = 2.0, facts: int = 40) -> Arm:
    """So many of `n` prompts right, the first ones, half of them with 4 pairs and half with 8."""
    flags = torch.arange(n) < right
    known = torch.arange(40) < facts
    tasks = {
        "kv_retrieval/4": flags[::2],
        "kv_retrieval/8": flags[1::2],
        "closed_book": known,
        "closed_book_seen": known,
    }
    return Arm({"perplexity": perplexity}, tasks)


def test_sweeps_are_written_out() -> None:
    """From the end for `prune`, from below for others. `minimal` is the number of layers that was found."""
    config = pico_config(layers=4)
    sweeps, single = expand(recipe(sweeps=[{"kind": "prune"}, {"kind": "drop_one"}]), config)
    assert [(c.name, c.layers) for c in sweeps["prune"]] == [("prune_03", 3), ("prune_02", 2), ("prune_01", 1)]
    assert [(c.name, c.drop) for c in sweeps["drop_one"]] == [(f"drop_0{i}", (i,)) for i in range(4)]
    assert single == []
    change = {"name": "small", "layers": "minimal", "disable": ["L0H1"]}
    given = recipe(sweeps=[{"kind": "prune"}, {"kind": "drop_one", "layers": "minimal"}], changes=[change])
    for minimal, layers in ((None, None), (2, 2), (4, None)):
        sweeps, (small,) = expand(given, config, None, minimal)
        assert small.layers == layers and small.disable == ("L0H1",)
        assert {c.layers for c in sweeps["drop_one"]} == {layers}
        assert (len(sweeps["drop_one"]), len(sweeps["prune"])) == (layers or 4, 3)
    with pytest.raises(RecipeError, match=r"sweeps\.drop_one\.layers: 1000000000\. The model has 4 layers"):
        expand(recipe(sweeps=[{"kind": "drop_one", "layers": 10**9}]), config)
    with pytest.raises(RecipeError, match="prune_02"):
        expand(recipe(sweeps=[{"kind": "prune"}], changes=[{"name": "prune_02", "layers": 2}]), config)


def test_every_head_has_its_turn_in_the_order_of_heads_json(tmp_path: Path) -> None:
    zamba = pico_family_config("zamba2")
    sweeps, _ = expand(recipe(sweeps=[{"kind": "disable_one"}]), zamba)
    heads = [str(head) for spec in family_of(zamba).mixers(zamba) for head in spec.heads]
    assert [c.disable for c in sweeps["disable_one"]] == [(head,) for head in heads]
    assert [c.name for c in sweeps["disable_one"]] == [f"disable_{head.lower()}" for head in heads]
    config, path = pico_config(), tmp_path / "heads.json"
    scored = tuple(ScoredHead(HeadId.parse(n), "neither", "segment_end", {}) for n in ("L2H1", "L0H3", "L1H0"))
    path.write_text(json.dumps(to_json(HeadSet("m", "r", geometry_of(config), scored, scored[:1], "sharpen", 0))))
    sweep = {"kind": "disable_one", "heads": str(path), "top": 2}
    for more, expected in (({}, ["L2H1", "L0H3"]), ({"layers": 2}, ["L0H3", "L1H0"])):
        sweeps, _ = expand(recipe(sweeps=[{**sweep, **more}]), config)
        assert [c.disable[0] for c in sweeps["disable_one"]] == expected
    with pytest.raises(RecipeError, match="another model"):
        expand(recipe(sweeps=[sweep]), pico_config(layers=4))
    for text, fault in (("x", "not JSON"), ("{}", "model: Field required"), (None, "missing")):
        path.write_text(text) if text is not None else path.unlink()
        with pytest.raises(RecipeError, match=rf"sweeps\.disable_one\.heads: .*heads\.json \({fault}\)\. Set a heads"):
            expand(recipe(sweeps=[sweep]), config)


def test_heads_that_are_off() -> None:
    for name, fields, expected in (
        ("mamba2", {"disable": ("L1H2", "L0H3", "L1H0")}, {"L1H": [2, 0], "L0H": [3]}),
        ("mamba2", {"keep": ("L1H2", "L1H0")}, {"L1H": [1, 3]}),
        ("mamba2", {"keep": ("L1H2",), "keep_in": (1, 2)}, {"L1H": [0, 1, 3], "L2H": [0, 1, 2, 3]}),
        ("mamba2", {"keep_in": (0,)}, {"L0H": [0, 1, 2, 3]}),
        ("zamba2", {"keep": ("L1A2",)}, {"L1H": [0, 1, 2, 3], "L1A": [0, 1, 3]}),  # both mixers of a layer
    ):
        config = pico_config() if name == "mamba2" else pico_family_config(name)
        assert off_heads(Change(name="x", **fields), family_of(config).mixers(config)) == expected, fields


def test_what_the_model_has_not_is_refused() -> None:
    for name, change, words in (
        ("zamba2", {"disable": ("L9H0",)}, "L0H0 to"),
        ("zamba2", {"keep": ("L0A0",)}, "L0H0 to"),
        ("zamba2", {"disable": ("L2H0",), "layers": 2}, "L0H0 to L1A3"),
        ("zamba2", {"disable": ("L0H1",), "drop": (0,)}, "L1H0 to"),
        ("zamba2", {"layers": 4}, "4 layers. Set a smaller number"),
        ("zamba2", {"drop": (4,)}, "0 to 3"),
        ("zamba2", {"drop": (2,), "layers": 2}, "0 to 1"),
        ("zamba2", {"keep_in": (3,), "layers": 2}, "no heads"),
        ("nemotron_h", {"keep_in": (1,)}, "no heads"),
        ("mamba2", {"mask_last_row": True}, "no attention"),
        ("zamba2", {"mask_last_row": True, "layers": 1}, "no attention"),
        ("mamba2", {"swap": Swap(layer=1)}, r"changes\.x\.swap.*Only llamba models can swap"),
        ("llamba", {"swap": Swap(layer=1, teacher_layer=3)}, r"changes\.x\.swap.*no such head"),
        ("llamba", {"swap": Swap(layer=3)}, r"changes\.x\.swap.*L0H0 to"),
    ):
        with pytest.raises(RecipeError, match=words):
            check_change(Change(name="x", **change), pico_family_config(name), TEACHER, pico_family_config("llama"))


def test_a_swap_takes_the_layer_that_was_named() -> None:
    change = Change(name="x", swap=Swap(layer=1, teacher_layer=2, with_block=True))
    plan, section = swap_plan(change, pico_family_config("llamba"), TEACHER, pico_family_config("llama"))
    (graft,) = plan.grafts
    assert (graft.site.layer, graft.unit, graft.mode, graft.donors) == (1, "layer", "replace", ("L2",))
    assert section.with_block


def test_analyses_that_mean_nothing_are_refused() -> None:
    change, teacher = {"name": "x", "layers": 2}, {"model": "t"}
    for parts, words in (
        ({}, "an analysis needs a change"),
        ({"changes": [{"name": "x"}]}, "no effect: set"),
        ({"changes": [{"name": "base", "layers": 1}]}, "unique name"),
        ({"changes": [{"name": "x" * 101, "layers": 1}]}, "digits and underscores, at most 100"),
        ({"changes": [{"name": "x", "off": []}]}, "off"),
        ({"changes": [{"name": "x", "keep": ["L1H0"], "keep_in": [2]}]}, "keep_in"),
        ({"changes": [{"name": "x", "keep": ["L1H0"], "disable": ["L1H1"]}]}, "not both"),
        ({"changes": [{"name": "x", "layers": "minimal"}]}, "prune"),
        ({"changes": [{"name": "x", "layers": "most"}]}, r"changes\.0\.layers: 'most'\. It must be a number of 1 or"),
        ({"changes": [{"name": "x", "swap": {"layer": 1}}]}, "teacher"),
        ({"changes": [{**change, "swap": {"layer": 1}}], "teacher": teacher}, "cannot be combined"),
        ({"changes": [change], "teacher": teacher}, "teacher"),
        ({"sweeps": [{"kind": "prune"}, {"kind": "prune"}]}, "twice"),
        ({"sweeps": [{"kind": "prune", "layers": 2}]}, "does not use `layers`"),
        ({"sweeps": [{"kind": "drop_one", "heads": "heads.json"}]}, "does not use `heads`"),
        ({"sweeps": [{"kind": "swap_one"}], "teacher": {**teacher, "donors": {"L0H0": "L1H0"}}}, "donors"),
        ({"changes": [change], "evaluate": {"efficiency": {}}}, "an analysis .*remove `evaluate"),
        ({"changes": [change], "evaluate": {"read_twice": True}}, "an analysis .*remove `evaluate"),
        ({"changes": [change], "evaluate": {"lm_eval": {"tasks": "x"}}}, "an analysis .*remove `evaluate"),
    ):
        with pytest.raises(RecipeError, match=words):
            recipe(**parts)


def test_the_minimal_model_is_the_last_before_a_drop() -> None:
    """Of 200 answers the base has 180. A drop is more than the margin, and nothing comes back after it."""
    pruned = ("prune_03", "prune_02", "prune_01")
    for right, margin, layers in (
        ((179, 176, 60), 0.05, 2),
        ((60, 60, 60), 0.05, 4),
        ((179, 60, 180), 0.05, 3),
        ((168, 60, 60), 0.05, 4),
        ((168, 60, 60), 0.1, 3),
    ):
        arms = {"base": arm(180), **{name: arm(n) for name, n in zip(pruned, right, strict=True)}}
        assert minimal_model(arms, pruned, 4, margin)["layers"] == layers, (right, margin)
    # Of 20 prompts 3 are lost: 15 points, but p = 1/8.
    assert minimal_model({"base": arm(18, 20), "prune_01": arm(15, 20)}, ["prune_01"], 2, 0.05) == {
        "layers": 1, "of": 2, "accuracy": 0.75, "base": 0.9, "p_value": 0.125, "margin": 0.05,
    }  # fmt: skip


def test_the_table_pools_pairs_and_halves_and_is_corrected_for_the_number_of_arms() -> None:
    table = side_by_side({"base": arm(180), "less": arm(90, perplexity=3.0)})
    assert list(table["less"]) == ["kv_retrieval", "closed_book", "perplexity"]
    found, facts = table["less"]["kv_retrieval"], table["less"]["closed_book"]
    assert (found["accuracy"], found["n"], found["worse"], facts["n"], facts["worse"]) == (0.45, 200, True, 80, False)
    assert found["low"] < 0.45 < found["high"] and table["less"]["perplexity"] == 3.0
    # Five answers lost, p = 1/32: a loss by itself, none among ten arms.
    for others, worse in ((0, True), (9, False)):
        arms = {"base": arm(180), "x": arm(175), **{f"y{i}": arm(180) for i in range(others)}}
        found = side_by_side(arms)["x"]["kv_retrieval"]
        assert (found["p_value"], found["worse"]) == (1 / 32, worse)
