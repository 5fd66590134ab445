"""Schema of a stage's `optimizer`, and learning rates by the size of the base."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from surgery.recipe.section import Section
from surgery.recipe.sources import Weight

Beta = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0, le=1, examples=[2.0e-4])]
Share = Annotated[float, Field(ge=0, le=1)]
Factor = Annotated[float, Field(gt=0, le=100)]

# AdamW rates by weights: of the base, and of the new heads. The first was measured in this repository, the others are
# those of the recipes for published models.
RATES = ((562_784, 2.0e-3, 6.0e-3), (130_000_000, 2.0e-4, 2.0e-3), (2_700_000_000, 1.0e-4, 2.0e-3))


def rates(parameters: int) -> tuple[float, float]:
    """Interpolate the learning rates of the base and of the new heads in the logarithm of the size.

    Args:
        parameters: number of weights of the base. Beyond the sizes of `RATES`, the nearest rates apply.

    Returns:
        Both rates, with two significant digits.
    """
    sizes, *columns = np.log(RATES).T
    base, heads = (np.exp(np.interp(np.log(max(parameters, 1)), sizes, column)) for column in columns)
    return float(f"{base:.1e}"), float(f"{heads:.1e}")


class Optimizer(Section):
    """AdamW with separate learning rates for the spliced heads, for adapters, and for the base's weights."""

    lr: Rate | None = None
    """Learning rate of the base's weights. By default a rate for the base's size: 2e-3 up to 0.56 million weights, 2e-4
    at 130 million, 1e-4 from 2.7 billion on, interpolated in the logarithm of the size."""
    new_heads_lr: Rate | None = None
    """Learning rate of the spliced heads. By default a rate for the base's size: 6e-3 up to 0.56 million weights, 2e-3
    from 130 million on."""
    lr_factor: Factor = 1.0
    """Multiplies the default of `lr`. No effect if `lr` is set."""
    new_heads_lr_factor: Factor = 1.0
    """Multiplies the default of `new_heads_lr`. No effect if `new_heads_lr` is set."""
    lora_lr: Rate | None = None
    """Learning rate of LoRA adapters. By default `new_heads_lr`."""
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    weight_decay: Weight = 0.0
    warmup: int = Field(20, ge=0, le=10**9)
    """Steps of linear warm-up."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Learning rate after the warm-up. `cosine`: decay to `floor`. `wsd`: constant, then linear decay to `floor`.
    `constant`: no decay."""
    decay: Share = 0.1
    """wsd: share of the steps, at the end, in which the rate decays. The decay never begins before the warm-up ends."""
    floor: Share = 0.0
    """Final learning rate, as a share of the rate after the warm-up."""
    max_grad_norm: float = Field(1.0, gt=0)

    def at_size(self, parameters: int) -> Optimizer:
        """Return the section with the rates that are not set, for a base with this number of weights."""
        lr, new_heads_lr = rates(parameters)
        given = {
            "lr": lr * self.lr_factor if self.lr is None else self.lr,
            "new_heads_lr": new_heads_lr * self.new_heads_lr_factor if self.new_heads_lr is None else self.new_heads_lr,
        }
        return self.model_copy(update=given | {"lr_factor": 1.0, "new_heads_lr_factor": 1.0})

    @property
    def adapters_lr(self) -> float | None:
        """Learning rate of LoRA adapters. None if it is not known before `at_size`."""
        return self.new_heads_lr if self.lora_lr is None else self.lora_lr

    @property
    def decay_share(self) -> float:
        """Share of the steps, at the end, in which the rate decays linearly: `decay` with `wsd`, otherwise 0."""
        return self.decay if self.schedule == "wsd" else 0.0
