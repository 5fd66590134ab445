"""Teachers, and plans that copy from their heads."""

from __future__ import annotations

from surgery.models.lookup import geometry_of
from surgery.recipe import Splice, Teacher
from surgery.splice.plan import make_plan
from surgery.types import HeadId, HeadSet, Plan, ScoredHead
from tests.support.pico import pico_family


def teacher_of(name: str, **more):
    return pico_family(name, seed=5, **more)


def section(donors: dict[str, str] | None = None, **fields) -> Splice:
    return Splice(init="teacher", teacher=Teacher(model="a/teacher", donors=donors or {}), **fields)


def plan_for(model, teacher, splice_section: Splice, *names: str) -> Plan:
    chosen = tuple(ScoredHead(HeadId.parse(n), "neither", "answer_token", {}) for n in names)
    heads = HeadSet("m", "", geometry_of(model.config), (), chosen, "list", 0)
    return make_plan(heads, model.config, splice_section, 0, teacher.config)
