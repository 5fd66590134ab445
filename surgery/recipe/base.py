"""Schema of the models in a recipe: base, teacher and control."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PrivateAttr

from surgery.recipe.section import HeadName, Positive, Section


class Checkpoint(Section):
    """A model to compare with or to copy from. It is never changed."""

    model: str
    """Checkpoint folder, or Hub id."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    """Dtype of the weights in memory."""


class Base(Section):
    """The pretrained model to splice."""

    model: str
    """Checkpoint folder, or Hub id."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    tokenizer: str | None = None
    """Folder or Hub id of the tokenizer. By default that of the model."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    """Dtype of the weights in memory."""
    trust_remote_code: bool = False
    """Run modelling code that comes with the checkpoint."""
    channels_per_head: Positive | None = None
    """Mamba-1 only, which has channels and no heads: channels per head. By default 64."""
    _field: str = PrivateAttr("base.model")

    @property
    def field(self) -> str:
        """What errors of a loader name: the recipe's key of the model, or a command's argument."""
        return self._field

    def named(self, field: str) -> Base:
        """Return a copy whose errors name another key or argument, such as `control.model` or `MODEL`."""
        copy = self.model_copy()
        copy._field = field
        return copy


def as_base(checkpoint: Checkpoint, field: str) -> Base:
    """Return the checkpoint as a `Base`, the type that the loader accepts.

    Args:
        field: the recipe's key of the model, for errors.
    """
    return Base(model=checkpoint.model, revision=checkpoint.revision, dtype=checkpoint.dtype).named(field)


class Teacher(Checkpoint):
    """A Transformer whose attention is transplanted. Its hidden size must equal the base's."""

    donors: dict[HeadName, HeadName] = Field({}, examples=[{"L17H3": "L17H24"}])
    """Teacher head for a head of the base, such as {L17H3: L17H24}. By default the same name."""
