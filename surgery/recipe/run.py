"""Schema of a recipe: one YAML file that holds all settings of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from surgery.recipe.base import Base, Checkpoint, Teacher
from surgery.recipe.evaluate import Evaluate
from surgery.recipe.export import LAYER_FORMATS, Export, Hardware
from surgery.recipe.locate import Locate
from surgery.recipe.methods import METHODS, RANKINGS
from surgery.recipe.objectives import OBJECTIVES
from surgery.recipe.section import Plugins, Section, Seed
from surgery.recipe.splice import Splice
from surgery.recipe.train import Train, TrainStage

RECIPE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$"
_LAYER_FORMS = ("block", "pair")  # values of `splice.form` that insert layers
_ALIGNED = frozenset({"teacher.attention", "teacher.full_attention", "teacher.hidden_states"})  # by `align`
# Outputs that are compared head by head or layer by layer, which inserted layers would shift.
_LAYER_BY_LAYER = frozenset({"model.full_attention", "model.hidden_states", "teacher.attention"})


class Recipe(Section):
    """Settings of a run: turn a pretrained model into an exported hybrid, or train a hybrid further."""

    name: str = Field(pattern=RECIPE_NAME)
    """Names the run folder, runs/NAME."""
    seed: Seed = 0
    base: Base
    locate: Locate = Locate()
    splice: Splice | None = Splice()
    """Heads to splice. null if the base is a hybrid already."""
    control: Checkpoint | None = None
    """With `splice: null`: a model without a splice to train the same way, such as the hybrid's base. By default no
    control is trained."""
    train: Train = Field(default_factory=Train)
    evaluate: Evaluate = Evaluate()
    export: Export = Export()
    hardware: Hardware = Hardware()
    plugins: Plugins = ()

    @model_validator(mode="before")
    @classmethod
    def _inserted_layers_are_exported_as_such(cls, data: Any) -> Any:
        """`export.format` is `nemotron_h` by default with `splice.form: block` or `pair`."""
        splice = data.get("splice") if isinstance(data, Mapping) else None
        form = splice.get("form") if isinstance(splice, Mapping) else getattr(splice, "form", None)
        export = data.get("export", {}) if form in _LAYER_FORMS else None
        return {**data, "export": {"format": LAYER_FORMATS[0], **export}} if isinstance(export, Mapping) else data

    @model_validator(mode="after")
    def _form_is_supported(self) -> Recipe:
        if self.splice is None:
            return self
        form, export = f"splice.form: {self.splice.form}", self.export.format
        if self.splice.form == "head":
            if export in LAYER_FORMATS:
                raise ValueError(f"export.format: {export} needs splice.form block or pair. Remove it, or set the form")
            return self
        if export == "transformers":
            raise ValueError(
                f"{form} needs export.format: {' or '.join(LAYER_FORMATS)}. Set it, or remove export.format"
            )
        if self.train.compile:
            raise ValueError(f"{form} does not support train.compile. Remove it")
        for stage in self.train.sequence:
            if stage.trainable in ("spliced_layers", "lora"):
                raise ValueError(f"{form} does not support trainable: {stage.trainable}. Set all or new_heads")
            for name in stage.objectives:
                compared = _LAYER_BY_LAYER & set(OBJECTIVES[name].needs)
                if compared:
                    raise ValueError(
                        f"{form} does not support the objective {name} ({min(compared)}). Set its weight to 0"
                    )
        return self

    @model_validator(mode="after")
    def _held_out_prompts_are_not_located_on(self) -> Recipe:
        located = self.locate.data
        if located is None:
            return self
        for data in self.train.own_data:
            if not data.holdout or not data.may_share_rows(located) or data.holds_out_by == located.holds_out_by:
                continue
            if data.holdout != located.holdout:
                raise ValueError(
                    f"locate.data.holdout: {located.holdout:g}, but train.sources hold out {data.holdout:g} of this "
                    "file. Set the same, or heads are located on prompts that are evaluated"
                )
            raise ValueError(
                "locate.data.columns: train.sources read other columns of this file. They decide which rows are held "
                "out, so heads would be located on prompts that are evaluated. Set the same columns"
            )
        return self

    @model_validator(mode="after")
    def _choice_is_measured(self) -> Recipe:
        select = self.splice.select if self.splice is not None else ""
        if select in RANKINGS and RANKINGS[select].name not in self.locate.methods:
            measured = [METHODS[method].ranks for method in self.locate.methods if METHODS[method].ranks]
            others = f", or set splice.select to {' or '.join(measured)}" if measured else ""
            raise ValueError(f"splice.select: {select} needs {RANKINGS[select].name} in locate.methods. Add it{others}")
        return self

    @model_validator(mode="after")
    def _control_is_the_base(self) -> Recipe:
        if self.control is not None and self.splice is not None:
            raise ValueError("`control` needs `splice: null`. With a splice the base is the control: remove `control`")
        return self

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings about training that is possible, but hardly what was meant."""
        found = []
        if self.control is not None and not self.has_control:
            found.append("control.model has no effect with `train.control: false`, or if only new heads train")
        if self.locate.where != "everywhere" and "ablation" not in self.locate.methods:
            found.append("locate.where has no effect without `ablation` in `locate.methods`")
        copied = self.splice is not None and self.splice.init != "teacher"
        if copied and not any(OBJECTIVES[name].needs_splice for name in self.train.objectives):
            found.append(
                "train.sources: no source supervises the attention of the new heads, and answers alone teach them "
                "little. Add `attention: 1.0` to the `weights` of a source whose answers stand in the prompt"
            )
        for stage in self.train.sequence:
            name = f"train.stages ({stage.name})" if self.train.stages else "train"
            needed = {
                "lora": (stage.trainable == "lora", "`trainable: lora`"),
                "distil": (bool({"base.logits", "teacher.logits"} & stage.needs), "a weight of `base_kl` or `distil`"),
                "align": (bool(_ALIGNED & stage.needs), "an objective on a teacher's attention or hidden states"),
            }
            for key, (has, need) in needed.items():
                if not has and key in stage.changed:
                    found.append(f"{name}.{key} has no effect without {need}")
            optimizer = stage.optimizer
            if stage.distil.cache and "base.logits" in stage.needs and "teacher.logits" not in stage.needs:
                found.append(f"{name}.distil.cache has no effect without a weight of `distil`")
            if optimizer.schedule != "wsd" and "decay" in optimizer.changed:
                found.append(f"{name}.optimizer.decay has no effect without `schedule: wsd`")
            if optimizer.schedule == "constant" and optimizer.floor:
                found.append(f"{name}.optimizer.floor has no effect with `schedule: constant`")
            if optimizer.lora_lr is not None and stage.trainable != "lora":
                found.append(f"{name}.optimizer.lora_lr has no effect without `trainable: lora`")
            for rate in ("lr", "new_heads_lr"):
                if getattr(optimizer, rate) is not None and getattr(optimizer, f"{rate}_factor") != 1:
                    found.append(f"{name}.optimizer.{rate}_factor has no effect with `{rate}`")
            if stage.num_steps <= optimizer.warmup:
                what = stage.name if len(self.train.sequence) > 1 else "training"
                given = f"{optimizer.warmup}, but {what} has {stage.num_steps} steps"
                found.append(f"{name}.optimizer.warmup: {given}, so the learning rate never reaches its full value")
        return tuple(dict.fromkeys(found))  # both stages of `read_steps` have most of the same settings

    @property
    def has_control(self) -> bool:
        """Whether a control is trained: the base, or with `splice: null` the model `control`."""
        return self.train.has_control and (self.splice is not None or self.control is not None)

    @property
    def keeps_base(self) -> bool:
        """Whether the hybrid without its spliced heads is the base: they are added to it, and nothing else trains."""
        splice = self.splice
        adds = splice is not None and (splice.form, splice.mode, splice.state_size) == ("head", "add", None)
        return adds and not any(stage.trains_control for stage in self.train.sequence)

    def arms_of(self, stage: TrainStage) -> int:
        """Number of models that a stage trains: the control skips stages that train new heads only."""
        return 2 if self.has_control and stage.trains_control else 1

    @property
    def teacher(self) -> Teacher | None:
        """The teacher whose attention is transplanted, or None."""
        return self.splice.teacher if self.splice is not None else None

    @property
    def state_size(self) -> int | None:
        """Number of channels that the state is cut to, or None."""
        return self.splice.state_size if self.splice is not None else None
