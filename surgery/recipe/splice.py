"""What is spliced, and how it begins."""

from __future__ import annotations

from pydantic import Field, model_validator

from surgery.recipe.base import Teacher
from surgery.recipe.locate import Select
from surgery.recipe.section import Positive, Section
from surgery.types import HeadId, Init, Mode, Unit


class Splice(Section):
    """What is put there."""

    select: Select = Field(
        "sharpen",
        description="Which heads: by what measure, as listed in `heads`, or for control at random or evenly spaced.",
    )
    num_heads: Positive = Field(1, description="How many heads to splice.")
    heads: tuple[str, ...] = Field((), description="With `select: list`: the heads, such as L1H2.")
    mode: Mode = Field("add", description="`add`: a branch beside the SSM, zero at first. `replace`: the head goes.")
    init: Init = Field(
        "ssm",
        description="`ssm`: copies of the head's C, B, x and gate. `teacher`: a Transformer's. `random`: the control.",
    )
    unit: Unit = Field(
        "head",
        description="`layer` puts the teacher's whole attention in the place of each chosen head's mixer (Llamba).",
    )
    with_block: bool = Field(
        False, description="With `unit: layer`: the teacher's norms and MLP of that layer as well."
    )
    teacher: Teacher | None = Field(None, description="With `init: teacher`: whose attention.")
    random_width: Positive = Field(32, description="Query and key width of a randomly initialised head.")

    @model_validator(mode="after")
    def _list_and_select(self) -> Splice:
        for name in self.heads:
            HeadId.parse(name)
        if len(set(self.heads)) < len(self.heads):
            raise ValueError("the same head is listed twice")
        if (self.select == "list") != bool(self.heads):
            raise ValueError("`heads` goes with `select: list`, and only with it")
        if (self.init == "teacher") != (self.teacher is not None):
            raise ValueError("`teacher` goes with `init: teacher`, and only with it")
        if self.unit == "layer" and (self.init, self.mode) != ("teacher", "replace"):
            raise ValueError("`unit: layer` needs `init: teacher` and `mode: replace`")
        if self.with_block and self.unit != "layer":
            raise ValueError("`with_block` goes with `unit: layer`")
        return self
