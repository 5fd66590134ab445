"""Schema of a stage's `distil` and `align`: how it compares with the frozen base or a teacher."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from surgery.recipe.section import Positive, Section
from surgery.types import HeadId


class Distil(Section):
    """How `base_kl` and `distil` compare two next-token distributions."""

    divergence: Literal["forward", "reverse", "jensen_shannon"] = "forward"
    """`forward`: KL(teacher || student). `reverse`: KL(student || teacher). `jensen_shannon`: mean of the KL of both
    from their average."""
    temperature: float = Field(1.0, gt=0)
    """Divides both logits. The loss is multiplied by its square."""
    top_k: Positive | None = None
    """Compare the teacher's k most likely tokens, with all other tokens as one event. By default all tokens are
    compared."""
    cache: bool = False
    """Write the teacher's top_k logits to disk at first use, and read them from there later."""

    @model_validator(mode="after")
    def _cache_is_small(self) -> Distil:
        if self.cache and self.top_k is None:
            raise ValueError("`cache` needs `top_k`: the logits of the whole vocabulary would fill the disk")
        return self


class Align(Section):
    """Which heads and layers of the teacher correspond to those of the hybrid."""

    heads: dict[str, str] = Field({}, examples=[{"L17H3": "L17H24"}])
    """Teacher head for a spliced head, such as {L17H3: L17H24}. By default the head of the same name."""
    offsets: dict[str, int] = Field({}, examples=[{"L17H3": -1}])
    """Distance in tokens from the place that the teacher's head reads to the place that the spliced head should read,
    such as {L17H3: -1} for the token before."""
    layers: dict[int, int] = Field({}, examples=[{1: 2}])
    """Teacher layer for each layer to compare. By default all layers, matched in proportion to depth."""

    @field_validator("heads", "offsets")
    @classmethod
    def _heads(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in (*value, *(other for other in value.values() if isinstance(other, str))):
            HeadId.parse(name)
        return value
