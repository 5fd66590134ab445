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
from surgery.reproduce.analysis import minimal_model, side_by_side
from surgery.reproduce.expansion import check_change, expand, off_heads, swap_plan
from surgery.types import HeadId, HeadSet, ScoredHead, to_json
from tests.support.pico import pico_config, pico_family_config

TEACHER = Teacher(model="teacher")


def recipe(**parts: Any) -> AnalysisRecipe:
    return check_recipe({"name": "x", "base": {"model": "m"}, **parts}, AnalysisRecipe)


@pytest.mark.parametrize("evaluate", [{"efficiency": {}}, {"read_twice": True}, {"lm_eval": {"tasks": "x"}}])
def test_an_evaluation_that_an_analysis_would_ignore_is_refused(evaluate: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=r"an analysis .*remove `evaluate"):
        recipe(changes=[{"name": "a", "disable": ["L0H0"]}], evaluate=evaluate)


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


class TestExpand:
    def test_prunes_from_the_end_and_drops_from_below(self) -> None:
        sweeps, single = expand(recipe(sweeps=[{"kind": "prune"}, {"kind": "drop_one"}]), pico_config(layers=4))
        assert [(c.name, c.layers) for c in sweeps["prune"]] == [("prune_03", 3), ("prune_02", 2), ("prune_01", 1)]
        assert [(c.name, c.drop) for c in sweeps["drop_one"]] == [(f"drop_0{i}", (i,)) for i in range(4)]
        assert single == []

    @pytest.mark.parametrize(("minimal", "layers"), [(None, None), (2, 2), (4, None)])
    def test_minimal_is_the_number_that_was_found(self, minimal: int | None, layers: int | None) -> None:
        change = {"name": "small", "layers": "minimal", "disable": ["L0H1"]}
        given = recipe(sweeps=[{"kind": "prune"}, {"kind": "drop_one", "layers": "minimal"}], changes=[change])
        sweeps, (small,) = expand(given, pico_config(layers=4), minimal)
        assert small.layers == layers and small.disable == ("L0H1",)
        assert {c.layers for c in sweeps["drop_one"]} == {layers}
        assert len(sweeps["drop_one"]) == (layers or 4)
        assert len(sweeps["prune"]) == 3

    def test_every_head_has_its_turn(self) -> None:
        config = pico_family_config("zamba2")
        sweeps, _ = expand(recipe(sweeps=[{"kind": "disable_one"}]), config)
        heads = [str(head) for spec in family_of(config).mixers(config) for head in spec.heads]
        assert [c.disable for c in sweeps["disable_one"]] == [(head,) for head in heads]
        assert [c.name for c in sweeps["disable_one"]] == [f"disable_{head.lower()}" for head in heads]

    def test_heads_come_in_the_order_of_heads_json(self, tmp_path: Path) -> None:
        config, path = pico_config(), tmp_path / "heads.json"
        names = ("L2H1", "L0H3", "L1H0")
        scored = tuple(ScoredHead(HeadId.parse(n), "neither", "segment_end", {}) for n in names)
        heads = HeadSet("m", "r", geometry_of(config), scored, scored[:1], "sharpen", 0)
        path.write_text(json.dumps(to_json(heads)))
        sweep = {"kind": "disable_one", "heads": str(path), "top": 2}
        assert [c.disable[0] for c in expand(recipe(sweeps=[sweep]), config)[0]["disable_one"]] == ["L2H1", "L0H3"]
        below = {**sweep, "layers": 2}
        assert [c.disable[0] for c in expand(recipe(sweeps=[below]), config)[0]["disable_one"]] == ["L0H3", "L1H0"]
        with pytest.raises(RecipeError, match="another model"):
            expand(recipe(sweeps=[sweep]), pico_config(layers=4))

    def test_a_name_that_a_sweep_gives_is_taken(self) -> None:
        given = recipe(sweeps=[{"kind": "prune"}], changes=[{"name": "prune_02", "layers": 2}])
        with pytest.raises(RecipeError, match="prune_02"):
            expand(given, pico_config())


class TestHeadsThatAreOff:
    SPECS = family_of(pico_config()).mixers(pico_config())

    def off(self, **fields: Any) -> dict[str, list[int]]:
        return off_heads(Change(name="x", **fields), self.SPECS)

    def test_disabled_ones(self) -> None:
        assert self.off(disable=("L1H2", "L0H3", "L1H0")) == {"L1H": [2, 0], "L0H": [3]}

    def test_all_but_the_kept_of_their_layers(self) -> None:
        assert self.off(keep=("L1H2", "L1H0")) == {"L1H": [1, 3]}

    def test_all_but_the_kept_of_the_layers_said(self) -> None:
        assert self.off(keep=("L1H2",), keep_in=(1, 2)) == {"L1H": [0, 1, 3], "L2H": [0, 1, 2, 3]}
        assert self.off(keep_in=(0,)) == {"L0H": [0, 1, 2, 3]}

    def test_both_mixers_of_a_layer(self) -> None:
        config = pico_family_config("zamba2")
        off = off_heads(Change(name="x", keep=("L1A2",)), family_of(config).mixers(config))
        assert off == {"L1H": [0, 1, 2, 3], "L1A": [0, 1, 3]}


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("zamba2", {"disable": ("L9H0",)}, "L0H0 to"),
        ("zamba2", {"disable": ("L0A0",)}, "L0H0 to"),
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
    ],
)
def test_what_the_model_has_not_is_refused(name: str, change: dict, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        check_change(Change(name="x", **change), pico_family_config(name))


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("mamba2", {}, "Only llamba models can swap"),
        ("zamba2", {"layer": 0}, "Only llamba models can swap"),
        ("llamba", {"teacher_layer": 3}, "no such head"),
        ("llamba", {"layer": 3}, "L0H0 to"),
    ],
)
def test_swaps_that_cannot_be_made_are_refused(name: str, fields: dict, says: str) -> None:
    change = Change(name="x", swap=Swap(**{"layer": 1, **fields}))
    with pytest.raises(RecipeError, match=f"changes.x.swap.*{says}"):
        check_change(change, pico_family_config(name), TEACHER, pico_family_config("llama"))


def test_a_swap_takes_the_layer_that_was_named() -> None:
    change = Change(name="x", swap=Swap(layer=1, teacher_layer=2, with_block=True))
    plan, section = swap_plan(change, pico_family_config("llamba"), TEACHER, pico_family_config("llama"))
    (graft,) = plan.grafts
    assert (graft.site.layer, graft.unit, graft.mode, graft.donors) == (1, "layer", "replace", ("L2",))
    assert section.with_block


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({}, "an analysis needs a change"),
        ({"changes": [{"name": "x"}]}, "no effect: set"),
        ({"changes": [{"name": "base", "layers": 1}]}, "unique name"),
        ({"changes": [{"name": "x", "off": []}]}, "off"),
        ({"changes": [{"name": "x", "keep": ["L1H0"], "keep_in": [2]}]}, "keep_in"),
        ({"changes": [{"name": "x", "keep": ["L1H0"], "disable": ["L1H1"]}]}, "not both"),
        ({"changes": [{"name": "x", "layers": "minimal"}]}, "prune"),
        ({"changes": [{"name": "x", "swap": {"layer": 1}}]}, "teacher"),
        (
            {"changes": [{"name": "x", "swap": {"layer": 1}, "layers": 2}], "teacher": {"model": "t"}},
            "cannot be combined",
        ),
        ({"changes": [{"name": "x", "layers": 2}], "teacher": {"model": "t"}}, "teacher"),
        ({"sweeps": [{"kind": "prune"}, {"kind": "prune"}]}, "twice"),
        ({"sweeps": [{"kind": "prune", "layers": 2}]}, "does not use `layers`"),
        ({"sweeps": [{"kind": "drop_one", "heads": "heads.json"}]}, "does not use `heads`"),
        ({"sweeps": [{"kind": "swap_one"}], "teacher": {"model": "t", "donors": {"L0H0": "L1H0"}}}, "donors"),
    ],
)
def test_analyses_that_mean_nothing_are_refused(parts: dict, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        recipe(**parts)


class TestMinimalModel:
    PRUNED = ("prune_03", "prune_02", "prune_01")

    def found(self, *right: int, margin: float = 0.05) -> dict[str, Any]:
        arms = {"base": arm(180), **{name: arm(n) for name, n in zip(self.PRUNED, right, strict=True)}}
        return minimal_model(arms, self.PRUNED, 4, margin)

    def test_is_the_last_before_a_drop(self) -> None:
        found = self.found(179, 176, 60)
        assert (found["layers"], found["of"], found["accuracy"], found["base"]) == (2, 4, 0.88, 0.9)

    def test_is_the_whole_model_where_the_first_cut_is_a_drop(self) -> None:
        assert (self.found(60, 60, 60)["layers"], self.found(60, 60, 60)["p_value"]) == (4, 1.0)

    def test_does_not_come_back_after_a_drop(self) -> None:
        assert self.found(179, 60, 180)["layers"] == 3

    def test_a_drop_is_more_than_the_margin(self) -> None:
        """12 of 200 answers lost and none won: significant, p = 2^-12."""
        assert (self.found(168, 60, 60)["layers"], self.found(168, 60, 60, margin=0.1)["layers"]) == (4, 3)

    def test_a_drop_is_significant(self) -> None:
        """Of 20 prompts 3 are lost: 15 points, p = 1/8."""
        arms = {"base": arm(18, 20), "prune_01": arm(15, 20)}
        assert minimal_model(arms, ["prune_01"], 2, 0.05) == {
            "layers": 1, "of": 2, "accuracy": 0.75, "base": 0.9, "p_value": 0.125, "margin": 0.05,
        }  # fmt: skip


class TestSideBySide:
    def test_pools_pairs_and_halves(self) -> None:
        table = side_by_side({"base": arm(180), "less": arm(90, perplexity=3.0)})
        assert list(table["less"]) == ["kv_retrieval", "closed_book", "perplexity"]
        found = table["less"]["kv_retrieval"]
        assert (found["accuracy"], found["n"], table["less"]["closed_book"]["n"]) == (0.45, 200, 80)
        assert found["low"] < 0.45 < found["high"]
        assert (found["worse"], table["less"]["closed_book"]["worse"]) == (True, False)
        assert table["less"]["perplexity"] == 3.0 and "p_value" not in table["base"]["kv_retrieval"]

    def test_is_corrected_for_the_number_of_arms(self) -> None:
        """Five answers lost, p = 1/32: a loss by itself, none among ten arms."""
        alone = side_by_side({"base": arm(180), "x": arm(175)})
        among = side_by_side({"base": arm(180), "x": arm(175), **{f"y{i}": arm(180) for i in range(9)}})
        p_values = [t["x"]["kv_retrieval"]["p_value"] for t in (alone, among)]
        assert p_values == [1 / 32, 1 / 32]
        assert [t["x"]["kv_retrieval"]["worse"] for t in (alone, among)] == [True, False]
