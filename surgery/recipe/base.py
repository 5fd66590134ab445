"""The models that a recipe names."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from surgery.recipe.section import Positive, Section
from surgery.types import HeadId


class Checkpoint(Section):
    """A model that is read and never changed."""

    model: str = Field(description="Folder of a checkpoint, or its id on the Hub.")
    revision: str | None = Field(None, description="Branch, tag or commit of a Hub id.")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = Field("float32", description="Of its weights in memory.")


class Base(Section):
    """The pretrained model that is operated on."""

    model: str = Field(description="Folder of a checkpoint, or its id on the Hub.")
    revision: str | None = Field(None, description="Branch, tag or commit of a Hub id.")
    tokenizer: str | None = Field(None, description="Where the tokenizer is, if not with the model.")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = Field("float32", description="Of the weights in memory.")
    trust_remote_code: bool = Field(False, description="Run code that the checkpoint brings along.")
    channels_per_head: Positive | None = Field(
        None, description="Mamba-1 has channels and no heads: how many of them are taken as one. 64 if not said."
    )


def as_base(given: Checkpoint) -> Base:
    """The same checkpoint, as what loads one wants it."""
    return Base(model=given.model, revision=given.revision, dtype=given.dtype)


class Teacher(Checkpoint):
    """A Transformer whose attention is transplanted. It has to be as wide as the base."""

    donors: dict[str, str] = Field(
        {},
        description="Its head for a head of the base, such as {L17H3: L17H24}; the one of the same name if not said.",
    )

    @field_validator("donors")
    @classmethod
    def _heads(cls, value: dict[str, str]) -> dict[str, str]:
        for name in (*value, *value.values()):
            HeadId.parse(name)
        return value
