"""Schema of analysis recipes, which evaluate a model with parts of it removed (arXiv 2504.18574)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from surgery.recipe.base import Base, Teacher
from surgery.recipe.evaluate import Evaluate
from surgery.recipe.section import HeadName, Plugins, Positive, Section, Seed, one_message
from surgery.types import HeadId

ARM_NAME = r"^[a-z0-9][a-z0-9_]{0,99}$"
Layer = Annotated[int, Field(ge=0, strict=True, description="Counted from 0.", examples=[3])]
Layers = Annotated[Positive | Literal["minimal"] | None, one_message("a number of 1 or more, or minimal")]


class Swap(Section):
    """Replace the mixer of one layer by the teacher's attention."""

    layer: Layer
    teacher_layer: Layer | None = None
    """Layer of the teacher. By default the layer with the same number."""
    with_block: bool = False
    """Also replace the norms and the MLP of that layer."""


class Change(Section):
    """One change of the model, as in the paper's experiments. Weights stay the same."""

    name: str = Field(pattern=ARM_NAME)
    """Name of the arm in tables and results."""
    disable: tuple[HeadName, ...] = Field((), examples=[["L17H24"]])
    """Heads to ablate at every token, such as L17H24."""
    keep: tuple[HeadName, ...] = Field((), examples=[["L17H24"]])
    """Heads to keep: all other heads in their layers are ablated. MLPs and other layers stay."""
    keep_in: tuple[Layer, ...] = Field((), examples=[[3]])
    """Layers in which all heads except those of `keep` are ablated. By default the layers of `keep`."""
    drop: tuple[Layer, ...] = Field((), examples=[[3]])
    """Layers to skip, mixer and MLP."""
    layers: Layers = None
    """Number of layers to run, from the first. `minimal`: the number that the sweep `prune` finds."""
    mask_last_row: bool = False
    """Mask the last row of every attention matrix."""
    swap: Swap | None = None
    """Replace one layer by the teacher's attention (Llamba only)."""

    @model_validator(mode="after")
    def _changes_something(self) -> Change:
        disabled = {HeadId.parse(head).layer for head in self.disable}
        kept = {HeadId.parse(head).layer for head in self.keep}
        others = disabled or kept or self.keep_in or self.drop or self.layers or self.mask_last_row
        if not (others or self.swap):
            raise ValueError("no effect: set `disable`, `keep`, `keep_in`, `drop`, `layers`, `mask_last_row` or `swap`")
        if others and self.swap:
            raise ValueError("`swap` cannot be combined with other keys")
        if self.keep_in and not kept <= set(self.keep_in):
            raise ValueError("every head of `keep` must lie in a layer of `keep_in`")
        if disabled & (kept | set(self.keep_in)):
            raise ValueError("a layer can have `disable` or `keep`, not both")
        return self


class Sweep(Section):
    """Apply one change to every layer or head in turn. Each result is one arm, such as `drop_03`."""

    kind: Literal["prune", "drop_one", "disable_one", "swap_one"] = Field(examples=["drop_one"])
    """`prune`: run only the first layers (`prune_03`: the first three). `drop_one`, `disable_one`, `swap_one`: change
    one layer or head."""
    layers: Layers = None
    """drop_one, disable_one: number of layers to run, from the first, or `minimal`."""
    heads: str | None = None
    """disable_one: heads.json of `surgery locate`, which sets the order. By default every head."""
    top: Positive | None = None
    """disable_one: number of heads, from the first in the order of `heads`."""
    with_block: bool = False
    """swap_one: also replace norms and MLPs."""

    @model_validator(mode="after")
    def _fields_have_a_meaning(self) -> Sweep:
        takes = {
            "prune": (),
            "drop_one": ("layers",),
            "disable_one": ("layers", "heads", "top"),
            "swap_one": ("with_block",),
        }[self.kind]
        for name in ("layers", "heads", "top", "with_block"):
            if getattr(self, name) and name not in takes:
                raise ValueError(f"{self.kind} does not use `{name}`: remove it")
        return self


class AnalysisRecipe(Section):
    """Evaluate retrieval and knowledge of a model with parts of it removed. Nothing is trained."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")
    """Names the run folder, runs/NAME."""
    seed: Seed = 0
    base: Base
    changes: tuple[Change, ...] = Field((), examples=[[{"name": "without_l17h24", "disable": ["L17H24"]}]])
    sweeps: tuple[Sweep, ...] = ()
    teacher: Teacher | None = None
    """Model whose layers `swap` and `swap_one` insert."""
    margin: float = Field(0.05, ge=0, lt=1)
    """Largest loss of KV-retrieval accuracy of the minimal model."""
    evaluate: Evaluate = Evaluate()
    plugins: Plugins = ()

    @model_validator(mode="after")
    def _parts_fit(self) -> AnalysisRecipe:
        names, kinds = [change.name for change in self.changes], [sweep.kind for sweep in self.sweeps]
        if not names + kinds:
            raise ValueError("an analysis needs a change: set `changes`, `sweeps` or both")
        if len({"base", *names}) <= len(names):
            raise ValueError("every change needs a unique name other than `base`")
        if len(set(kinds)) < len(kinds):
            raise ValueError(f"`sweeps` lists a kind twice: {', '.join(kinds)}. List each once")
        for name in ("tasks", "generate", "lm_eval", "efficiency", "read_twice"):
            if name in self.evaluate.changed:
                raise ValueError(f"an analysis measures the accuracy of fixed tasks: remove `evaluate.{name}`")
        counts = [change.layers for change in self.changes] + [sweep.layers for sweep in self.sweeps]
        if "prune" not in kinds and "minimal" in counts:
            raise ValueError("`layers: minimal` needs the sweep `prune`: add it")
        swaps = "swap_one" in kinds or any(change.swap for change in self.changes)
        if swaps != (self.teacher is not None):
            raise ValueError(
                "`swap` and `swap_one` need `teacher`: set it"
                if swaps
                else "only `swap` and `swap_one` use `teacher`: remove it"
            )
        if self.teacher is not None and self.teacher.donors:
            raise ValueError("an analysis does not use `teacher.donors`: set the layer in `swap.teacher_layer`")
        return self
