"""Registry of training objectives, and what a recipe has to know about each of them. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from surgery.registry import Registry

# What an objective may need besides the batch and the model's logits.
NEEDS = frozenset(
    {
        "answers",  # documents with answers
        "gold_positions",  # questions whose answer is at a known position
        "model.attention",  # rows of the spliced heads at the questions
        "model.full_attention",  # whole attention matrices of the spliced heads
        "model.hidden_states",
        "base.logits",  # of the frozen base
        "teacher.logits",
        "teacher.attention",
        "teacher.full_attention",
        "teacher.hidden_states",
    }
)


class ObjectiveInfo:
    """What a recipe knows about an objective; `surgery.train.objectives.Objective` adds how it is computed.

    Attributes:
        name: set by `register_objective`.
        description: one sentence for the schema of recipes.
        label: name in the figure of the losses; `name` if empty.
        needs: names from `NEEDS`.
        in_nats: a cross-entropy or divergence of next-token distributions, in nats a token. Training stops if it grows.
        starts_at_zero: the loss of the untrained model is 0, so it may grow.
        uses_temperature: the loss is multiplied by the square of `distil.temperature`.
    """

    name: str
    description: str = ""
    label: str = ""
    needs: tuple[str, ...] = ()
    in_nats: bool = False
    starts_at_zero: bool = False
    uses_temperature: bool = False

    @property
    def needs_splice(self) -> bool:
        """It compares the attention of spliced heads: a model without a splice is trained without it."""
        return bool({"model.attention", "model.full_attention"} & set(self.needs))

    @property
    def needs_teacher(self) -> bool:
        """It compares with a teacher."""
        return any(need.startswith("teacher.") for need in self.needs)

    def count(self, batch: Any) -> int:
        """Number of terms of the loss in a batch."""
        raise NotImplementedError

    def loss(self, inputs: Any) -> Any:
        """Sum of the loss over its terms."""
        raise NotImplementedError


OBJECTIVES: Registry[ObjectiveInfo] = Registry("objective", ("surgery.train.objectives",))


def needs_of(names: Iterable[str]) -> set[str]:
    """What any of these objectives needs."""
    return {need for name in names for need in OBJECTIVES[name].needs}
