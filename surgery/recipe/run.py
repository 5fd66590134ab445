"""Schema of a recipe: one YAML file that holds all settings of a run."""

from __future__ import annotations

from pydantic import Field, model_validator

from surgery.recipe.base import Base, Checkpoint, Teacher
from surgery.recipe.evaluate import Evaluate
from surgery.recipe.export import Export, Hardware
from surgery.recipe.locate import Locate
from surgery.recipe.methods import METHODS, RANKINGS
from surgery.recipe.section import Plugins, Section, Seed
from surgery.recipe.splice import Splice
from surgery.recipe.train import Train


class Recipe(Section):
    """Settings of a run: turn a pretrained model into an exported hybrid, or train a hybrid further."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$", description="Names the run folder, runs/NAME.")
    seed: Seed = 0
    base: Base
    locate: Locate = Locate()
    splice: Splice | None = Field(Splice(), description="Heads to splice. null if the base is a hybrid already.")
    control: Checkpoint | None = Field(
        None,
        description="With `splice: null`: a model without a splice to train the same way, such as the hybrid's base. "
        "By default no control is trained.",
    )
    train: Train
    evaluate: Evaluate = Evaluate()
    export: Export = Export()
    hardware: Hardware = Hardware()
    plugins: Plugins = ()

    @model_validator(mode="after")
    def _choice_is_measured(self) -> Recipe:
        select = self.splice.select if self.splice is not None else ""
        if select in RANKINGS and RANKINGS[select].name not in self.locate.methods:
            measured = [METHODS[method].ranks for method in self.locate.methods if METHODS[method].ranks]
            others = f", or set splice.select to {' or '.join(measured)}" if measured else ""
            raise ValueError(f"splice.select: {select} needs {RANKINGS[select].name} in locate.methods. Add it{others}")
        return self

    @model_validator(mode="after")
    def _trained_candidates_have_no_teacher(self) -> Recipe:
        if self.teacher is not None and self.locate.trained:
            names = " and ".join(self.locate.trained)
            raise ValueError(f"locate.methods: {names} cannot train copies of a teacher. Choose another method")
        return self

    @model_validator(mode="after")
    def _control_is_the_base(self) -> Recipe:
        if self.control is not None and self.splice is not None:
            raise ValueError("`control` needs `splice: null`. With a splice the base is the control: remove `control`")
        return self

    @property
    def has_control(self) -> bool:
        """Whether a control is trained: the base, or with `splice: null` the model `control`."""
        return self.train.has_control and (self.splice is not None or self.control is not None)

    @property
    def teacher(self) -> Teacher | None:
        """The teacher whose attention is transplanted, or None."""
        return self.splice.teacher if self.splice is not None else None

    @property
    def state_size(self) -> int | None:
        """Number of channels that the state is cut to, or None."""
        return self.splice.state_size if self.splice is not None else None
