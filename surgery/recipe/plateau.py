"""Schema of `train.plateau`: when a stage ends before its last step. See docs/TRAINING.md."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from surgery.recipe.section import Positive, Section


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
