"""From chosen heads to grafts, and from grafts to the config field: grouping, widths, and every refusal."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from surgery.errors import PlanError
from surgery.models.lookup import family_of, geometry_of
from surgery.models.spliced import plan_of_hybrid
from surgery.recipe import Splice
from surgery.splice.graft import splice_model
from surgery.splice.plan import make_plan, splice_field
from surgery.types import HeadId, HeadSet, Plan, ScoredHead, plan_from_json, to_json
from tests.support.battery import plan_of, spliced
from tests.support.cases import each
from tests.support.pico import (
    SPLICED_FAMILIES,
    pico_base,
    pico_config,
    pico_family,
    pico_family_config,
    pico_hybrid,
    pico_site,
)


def chosen(*names: str, reads: Any = "segment_end", config: Any = None) -> HeadSet:
    """A HeadSet that chose these heads, in this order."""
    heads = tuple(ScoredHead(HeadId.parse(name), "neither", reads, {}) for name in names)
    return HeadSet("m", "r", geometry_of(config or pico_config()), heads, heads, "list", 3)


class TestMakePlan:
    def test_groups_by_layer_and_keeps_the_order_within(self) -> None:
        plan = make_plan(chosen("L2H1", "L0H3", "L2H0"), pico_config(), seed=7)
        assert [(g.site.layer, g.heads) for g in plan.grafts] == [(0, (3,)), (2, (1, 0))]
        assert plan.heads == tuple(HeadId.parse(n) for n in ("L0H3", "L2H1", "L2H0"))
        assert (plan.base, plan.geometry, plan.seed) == ("m", geometry_of(pico_config()), 7)

    def test_a_plan_brings_the_section_it_was_made_with(self) -> None:
        """So `splice_model(base, plan)` builds the recipe's hybrid. A plan from a file has no section."""
        section, model = Splice(init="random", random_width=6), pico_base()
        plan = make_plan(chosen("L1H2"), model.config, section)
        wanted = splice_field(plan, model.config, section)
        assert splice_model(model, plan).config.splice == splice_field(plan, model.config) == wanted
        from_file = plan_from_json(to_json(plan))
        assert from_file == plan
        assert splice_model(model, from_file, section).config.splice == wanted
        assert splice_model(model, from_file).config.splice != wanted

    def test_heads_that_cannot_be_spliced_are_refused(self) -> None:
        """None, others than the section asks for, of another model, and unknown ones, named with the range."""
        another = pico_config(n_groups=2)
        for heads, config, section, says in (
            (chosen(), pico_config(), {}, r"^heads\.json chosen: \[\]\. No head is chosen"),
            (chosen("L1H2"), pico_config(), {"num_heads": 3}, r"chosen: L1H2\. splice\.heads or splice\.num_heads"),
            (chosen("L1H2"), pico_config(), {"select": "list", "heads": ["L2H0"]}, r"^heads\.json chosen: L1H2\."),
            (chosen("L1H2"), another, {}, r"heads\.json geometry.*Locate again"),
            *(
                (chosen(name), pico_config(), {}, rf"head: {name}\. The model has heads L0H0 to L2H3")
                for name in ("L3H0", "L1H4", "L1A0")
            ),
        ):
            with pytest.raises(PlanError, match=says):
                make_plan(heads, config, Splice.model_validate(section))

    def test_a_hybrid_is_not_spliced_again(self) -> None:
        """The plan fits it too: its trained heads would be replaced by new ones."""
        plan = make_plan(chosen("L1H2"), pico_config())
        with pytest.raises(PlanError, match=r"The model is a hybrid already"):
            splice_model(splice_model(pico_base(), plan), plan)


def test_plans_that_people_edited_are_refused() -> None:
    """A site that the model lacks, no heads, an unknown branch, two grafts for a layer, grafts in another order."""
    plan = make_plan(chosen("L1H2"), pico_config())
    (graft,), changed = plan.grafts, dataclasses.replace
    elsewhere = ({"head_dim": 8}, {"layer": 9}, {"path": "elsewhere"}, {"num_groups": 4})
    empty = changed(graft, heads=(), reads=())
    for grafts, says in (
        *(((changed(graft, site=changed(graft.site, **change)),), r"^plan\.json.*\[0, 1, 2\]") for change in elsewhere),
        *((grafts, r"^plan\.json.*at least one head") for grafts in ((), (empty,), (graft, empty))),
        ((changed(graft, init="magic"),), r"^graft\.init: 'magic'\. Use one of ssm, random, teacher, .*plugins"),
        ((graft, changed(graft, heads=(0,))), r"^plan\.json.*\[1, 1\]"),
        (make_plan(chosen("L0H2", "L2H1"), pico_config()).grafts[::-1], r"^plan\.json.*\[2, 0\].*order of their"),
    ):
        with pytest.raises(PlanError, match=says):
            splice_field(changed(plan, grafts=grafts), pico_config())
    with pytest.raises(PlanError, match=r"^plan\.json grafts: \[\]"):
        splice_model(pico_base(), changed(plan, grafts=()))


class TestDonors:
    BASE, TEACHER = pico_family_config("llamba"), pico_family_config("llama")

    def _plan(self, donors: dict[str, str], **more: Any) -> Plan:
        given = {"select": "list", "heads": ("L1H0", "L1H2"), "init": "teacher", "mode": "replace", **more}
        section = Splice.model_validate({**given, "teacher": {"model": "/home/t", "donors": donors}})
        return make_plan(chosen("L1H0", "L1H2", config=self.BASE), self.BASE, section, 0, self.TEACHER)

    def test_a_key_that_is_no_chosen_head_is_refused(self) -> None:
        plan = self._plan({"L1H2": "L2H0"})
        assert plan.grafts[0].donors == ("L1H0", "L2H0") and plan.teacher == "t", "no path is published"
        with pytest.raises(PlanError, match=r"^splice\.teacher\.donors: L1H3\. It is not in splice\.heads"):
            self._plan({"L1H3": "L2H0"})

    def test_a_whole_layer_has_one_donor(self) -> None:
        (graft,) = self._plan({"L1H0": "L2H0", "L1H2": "L2H1"}, unit="layer").grafts
        assert graft.donors == ("L2",)
        with pytest.raises(PlanError, match=r"^splice\.teacher\.donors: L2H0, L0H1\..*one layer of the teacher"):
            self._plan({"L1H0": "L2H0", "L1H2": "L0H1"}, unit="layer")


@each(
    ("name", "more"),
    [
        ("mamba2", {"use_bias": True}),
        ("mamba2", {"use_conv_bias": False}),
        ("bamba", {"mamba_proj_bias": True}),
        ("bamba", {"mamba_conv_bias": False}),
        ("zamba2", {"add_bias_linear": True}),
        ("nemotron_h", {"use_bias": True}),
    ],
)
def test_biases_follow_the_base(name: str, more: dict[str, bool]) -> None:
    """A copy of a projection with a bias has a bias."""
    plain, changed = (
        splice_field(plan_of(pico_family(name, **fields)), pico_family_config(name, **fields))[0]
        for fields in ({}, more)
    )
    ((field, value),) = more.items()
    part = "conv_bias" if "conv" in field else "bias"
    assert changed[part] is value and plain[part] is not value
    assert {k: v for k, v in changed.items() if k != part} == {k: v for k, v in plain.items() if k != part}


class TestPlanOfHybrid:
    """What a hybrid's config alone says of how it was spliced."""

    def test_entries_in_another_order_and_donors_that_are_no_list(self) -> None:
        config = pico_hybrid([pico_site(0), pico_site(2)]).config
        config.splice = config.splice[::-1]
        assert [graft.site.layer for graft in plan_of_hybrid(config, "").grafts] == [0, 2]
        config.splice[0]["donors"] = 5
        with pytest.raises(PlanError, match=r"^config\.json splice donors: 5\. It must be a list"):
            plan_of_hybrid(config, "")
        config.splice = [{**config.splice[1], "layer": 7}]
        with pytest.raises(PlanError, match=r"layer 7.*\[0, 1, 2\]"):
            plan_of_hybrid(config, "m")

    def _lost(self, plan: Plan) -> Plan:
        """All of a plan that a config holds: not the base's name, the seed, or which teacher it was."""
        return dataclasses.replace(plan, base="h", seed=0, teacher="")

    @each("name", SPLICED_FAMILIES)
    @each(("mode", "init"), [("add", "ssm"), ("replace", "random"), ("replace", "teacher")])
    def test_is_the_plan_that_it_was_spliced_by(self, name: str, mode: Any, init: Any) -> None:
        base = pico_family(name)
        config = spliced(base, mode, init).config
        reloaded = type(config).from_dict(config.to_dict())
        assert plan_of_hybrid(reloaded, "h") == self._lost(plan_of(base, mode, init))
        assert splice_field(plan_of(base), base.config), "the base's config is as it was"

    def test_whole_layers_are_sites_again(self) -> None:
        config, teacher = pico_family_config("llamba"), pico_family_config("llama")
        section = Splice.model_validate(
            {"init": "teacher", "teacher": {"model": "t"}, "mode": "replace", "unit": "layer"}
        )
        plan = make_plan(chosen("L1H0", config=config), config, section, 3, teacher)
        hybrid = family_of(config).hybrid_config(config, splice_field(plan, config, section, teacher))
        assert plan_of_hybrid(hybrid, "h") == self._lost(plan)
        assert len(family_of(hybrid).sites(hybrid)) == 2, "the config itself is not changed"
