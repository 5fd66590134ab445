"""The parts of an analysis recipe that say what is changed: the paper's procedures (arXiv 2504.18574).

Owns: their schema. Must never know: torch, models, how a part is removed (procedures).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from surgery.sections import Positive, Section
from surgery.types import HeadId

Layer = Annotated[int, Field(ge=0, strict=True, description="Counted from 0.")]
Layers = Positive | Literal["minimal"] | None


class Swap(Section):
    """One layer's mixer gives way to the attention of the analysis's teacher."""

    layer: Layer
    teacher_layer: Layer | None = Field(None, description="The teacher's layer; that of the same number if not said.")
    with_block: bool = Field(False, description="The teacher's norms and MLP of that layer as well.")


class Change(Section):
    """One of the paper's procedures: a model that is changed while it runs, its weights are not."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_]*$", description="Names the arm.")
    disable: tuple[str, ...] = Field(
        (), description="Heads whose contribution is removed at every token, such as L17H24."
    )
    keep: tuple[str, ...] = Field(
        (), description="Heads that stay: every other head of their layers is removed. MLPs and other layers stay too."
    )
    keep_in: tuple[Layer, ...] = Field(
        (), description="Layers where nothing but `keep` stays, if it is not just the layers of those heads."
    )
    drop: tuple[Layer, ...] = Field((), description="Layers that are passed by, mixer and MLP.")
    layers: Layers = Field(None, description="Only so many layers are run, from below; `minimal`: of sweep `prune`.")
    mask_last_row: bool = Field(False, description="The last token's attention sees nothing, in every attention layer.")
    swap: Swap | None = Field(None, description="A layer of the teacher's in the place of one of the model's (Llamba).")

    @model_validator(mode="after")
    def _changes_something(self) -> Change:
        disabled = {HeadId.parse(head).layer for head in self.disable}
        kept = {HeadId.parse(head).layer for head in self.keep}
        others = disabled or kept or self.keep_in or self.drop or self.layers or self.mask_last_row
        if not (others or self.swap):
            raise ValueError(
                "it changes nothing: give it `disable`, `keep`, `keep_in`, `drop`, `layers`, `mask_last_row` or `swap`"
            )
        if others and self.swap:
            raise ValueError("`swap` goes alone")
        if self.keep_in and not kept <= set(self.keep_in):
            raise ValueError("every head of `keep` must be in a layer of `keep_in`")
        if disabled & (kept | set(self.keep_in)):
            raise ValueError("a layer has `disable` or `keep`, not both")
        return self


class Sweep(Section):
    """One procedure, tried on every layer or head in turn: an arm each, such as `drop_03` or `disable_l1h2`."""

    kind: Literal["prune", "drop_one", "disable_one", "swap_one"] = Field(
        description="`prune`: the first layers alone, so many (`prune_03`: three). The others name what they change."
    )
    layers: Layers = Field(None, description="drop_one, disable_one: with so many layers from below; or `minimal`.")
    heads: str | None = Field(
        None, description="disable_one: the heads.json of `surgery locate`, in its order; every head if not said."
    )
    top: Positive | None = Field(None, description="disable_one: only the first so many heads.")
    with_block: bool = Field(False, description="swap_one: the teacher's norms and MLPs as well.")

    @model_validator(mode="after")
    def _fields_have_a_meaning(self) -> Sweep:
        takes = {"prune": (), "drop_one": ("layers",), "disable_one": ("layers", "heads", "top"),
                 "swap_one": ("with_block",)}[self.kind]  # fmt: skip
        for name in ("layers", "heads", "top", "with_block"):
            if getattr(self, name) and name not in takes:
                raise ValueError(f"{self.kind} takes no `{name}`")
        return self
