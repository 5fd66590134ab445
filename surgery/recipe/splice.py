"""The section `splice`: which heads, and the attention branch that they get."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from pydantic import Field, model_validator

from surgery.recipe.base import Teacher
from surgery.recipe.locate import Select
from surgery.recipe.section import Positive, Section
from surgery.registry import NameOf, Registry
from surgery.types import HeadId, Mode, Unit


class _Branches(Registry[Any]):
    """Attention branches by name, without importing torch: the built-in ones, and those that a plugin registered."""

    def items(self) -> tuple[tuple[str, Any], ...]:
        """Names with their classes; the built-in ones have their name instead until torch is imported."""
        module = sys.modules.get("surgery.hybrid.branches")
        built_in = {name: name for name in ("ssm", "random", "teacher")}
        return tuple({**built_in, **(module.BRANCHES if module else {})}.items())

    def needs_teacher(self, name: str) -> bool:
        """Return whether `splice.teacher` goes with this branch."""
        return bool(getattr(dict(self.items())[name], "needs_teacher", name == "teacher"))


_BRANCHES = _Branches("attention branch")


class Splice(Section):
    """Which heads are spliced, and with what."""

    select: Select = Field(
        "sharpen",
        description="How heads are chosen: by a measure, as listed in `heads`, or as a control, at random or evenly.",
    )
    num_heads: Positive = Field(1, description="How many heads to splice.")
    heads: tuple[str, ...] = Field((), description="With `select: list`: the heads, such as L1H2.")
    mode: Mode = Field(
        "add", description="`add`: a branch beside the SSM, zero at first. `replace`: the SSM head is silenced."
    )
    init: Annotated[str, NameOf(_BRANCHES)] = Field(
        "ssm",
        description="The attention branch. `ssm`: copies of the head's C, B, x and gate. `teacher`: a Transformer's. "
        "`random`: the control.",
    )
    unit: Unit = Field(
        "head",
        description="`layer` replaces the whole mixer of each chosen head by the teacher's attention (Llamba).",
    )
    with_block: bool = Field(
        False, description="With `unit: layer`: copy the teacher's norms and MLP of that layer as well."
    )
    teacher: Teacher | None = Field(
        None, description="With `init: teacher`: the Transformer whose attention is copied."
    )
    random_width: Positive = Field(32, description="Query and key width of a randomly initialised head.")

    @model_validator(mode="after")
    def _list_and_select(self) -> Splice:
        for name in self.heads:
            HeadId.parse(name)
        if len(set(self.heads)) < len(self.heads):
            raise ValueError("the same head is listed twice")
        if (self.select == "list") != bool(self.heads):
            raise ValueError("`heads` goes with `select: list`, and only with it")
        if _BRANCHES.needs_teacher(self.init) != (self.teacher is not None):
            raise ValueError("`teacher` goes with `init: teacher`, and only with it")
        if self.unit == "layer" and (self.init, self.mode) != ("teacher", "replace"):
            raise ValueError("`unit: layer` needs `init: teacher` and `mode: replace`")
        if self.with_block and self.unit != "layer":
            raise ValueError("`with_block` goes with `unit: layer`")
        return self
