"""The parts of an analysis recipe that say what is changed: the paper's procedures (arXiv 2504.18574).

Owns: their schema. Must never know: torch, models, how a part is removed (procedures).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from surgery.recipe.base import Base, Teacher
from surgery.recipe.evaluate import DEFAULT_TASKS, Evaluate
from surgery.recipe.export import Hardware
from surgery.recipe.section import Plugins, Positive, Section, Seed
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


class AnalysisRecipe(Section):
    """What a model can do with parts of it gone: retrieval and knowledge side by side. Nothing is trained."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$", description="Names the run folder, runs/NAME.")
    seed: Seed = 0
    base: Base
    changes: tuple[Change, ...] = ()
    sweeps: tuple[Sweep, ...] = ()
    teacher: Teacher | None = Field(None, description="Whose layers `swap` and `swap_one` put in.")
    margin: float = Field(
        0.05, ge=0, lt=1, description="KV-retrieval accuracy that the minimal model may lose, even significantly."
    )
    evaluate: Evaluate = Evaluate()
    hardware: Hardware = Hardware()
    plugins: Plugins = ()

    @model_validator(mode="after")
    def _names_differ(self) -> AnalysisRecipe:
        names, kinds = [change.name for change in self.changes], [sweep.kind for sweep in self.sweeps]
        if not names + kinds:
            raise ValueError("nothing is changed: give `changes`, `sweeps` or both")
        if len({"base", *names}) <= len(names):
            raise ValueError("every change needs a name of its own, other than `base`")
        if len(set(kinds)) < len(kinds):
            raise ValueError("the same sweep is listed twice")
        return self

    @model_validator(mode="after")
    def _asks_what_is_compared(self) -> AnalysisRecipe:
        if self.evaluate.tasks != DEFAULT_TASKS or self.evaluate.generate or self.evaluate.lm_eval is not None:
            raise ValueError("an analysis asks its own tasks: leave `evaluate.tasks`, `generate` and `lm_eval` out")
        return self

    @model_validator(mode="after")
    def _parts_are_there(self) -> AnalysisRecipe:
        kinds = [sweep.kind for sweep in self.sweeps]
        counts = [change.layers for change in self.changes] + [sweep.layers for sweep in self.sweeps]
        if "prune" not in kinds and "minimal" in counts:
            raise ValueError("`layers: minimal` needs the sweep `prune`, which finds it")
        swaps = "swap_one" in kinds or any(change.swap for change in self.changes)
        if swaps != (self.teacher is not None):
            raise ValueError("`teacher` goes with `swap` or `swap_one`, and only with them")
        if self.teacher is not None and self.teacher.donors:
            raise ValueError("`teacher.donors` are for splicing heads; name the layer in `swap.teacher_layer`")
        return self
