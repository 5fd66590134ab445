"""Schema of the parts of a stage of training: adapters, distillation and the end at a plateau."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from surgery.recipe.section import HeadName, OneOrMore, Positive, Section


class Lora(Section):
    """Low-rank adapters (PEFT) on the base's weights. Merged when the stage ends, and also saved separately."""

    rank: Positive = 8
    alpha: Positive = 16
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: OneOrMore[str] = Field(("in_proj", "out_proj"), min_length=1)
    """Names of the linear layers that get an adapter."""
    quantization: Literal["nf4"] | None = None
    """QLoRA: hold the frozen linear layers in 4 bits while the stage trains, with bitsandbytes. Adapters are merged
    into the unquantized weights."""


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

    heads: dict[HeadName, HeadName] = Field({}, examples=[{"L17H3": "L17H24"}])
    """Teacher head for a spliced head, such as {L17H3: L17H24}. By default the head of the same name."""
    offsets: dict[HeadName, int] = Field({}, examples=[{"L17H3": -1}])
    """Distance in tokens from the place that the teacher's head reads to the place that the spliced head should read,
    such as {L17H3: -1} for the token before."""
    layers: dict[int, int] = Field({}, examples=[{1: 2}])
    """Teacher layer for each layer to compare. By default all layers, matched in proportion to depth."""


class Plateau(Section):
    """End of a stage before its last step: a loss that no longer falls, as in `ReduceLROnPlateau` of PyTorch.

    Every `window` steps, the mean loss of these steps is compared with the lowest mean so far.
    """

    monitor: str = "loss"
    """Loss to compare: the weighted sum of all objectives, or the name of one objective."""
    window: Positive = 25
    """Steps of a mean."""
    threshold: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """A mean is an improvement if it is lower than the lowest one by more than this share of it."""
    patience: Positive = 3
    """Number of means in a row without an improvement that make a plateau. Counted from the first improvement, so a
    loss that has not fallen yet is not at a plateau."""
    min_steps: Positive | None = None
    """Steps before which the stage is not at a plateau. By default half of `steps`. The warm-up always ends first."""

    def least(self, steps: int, warmup: int) -> int:
        """First step that `min_steps` and the warm-up allow, in a stage of at most `steps` steps."""
        return max(warmup, -(-steps // 2) if self.min_steps is None else self.min_steps)

    def earliest(self, steps: int, warmup: int) -> int:
        """First step after which a plateau can be found, in a stage of at most `steps` steps.

        The first window has nothing to compare with, the second one can improve on it, and `patience` windows follow.
        """
        return self.window * max(self.patience + 2, -(-self.least(steps, warmup) // self.window))
