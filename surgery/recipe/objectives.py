"""Registry of training objectives, with what a recipe needs to know about each. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from surgery.registry import Registry

# Inputs that an objective may need besides the batch and the model's logits.
NEEDS = frozenset(
    {
        "answers",  # documents with answers
        "gold_positions",  # questions whose answer is at a known position
        "model.attention",  # rows of the spliced heads at the queries of answer tokens
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
    """Description of an objective for recipes. `surgery.train.objectives.Objective` adds the computation.

    Attributes:
        name: set by `register_objective`.
        description: one sentence for the schema of recipes.
        label: name in figures of losses; `name` if empty.
        needs: names from `NEEDS`.
        in_nats: True for a cross-entropy or divergence of next-token distributions, in nats per token. Training stops
            if it grows.
        starts_at_zero: True if the loss of the untrained model is 0, so that it may grow.
        uses_temperature: True if the loss is multiplied by the square of `distil.temperature`.
        reads_logits: tokens whose logits of the model `loss` reads: `all`, those before `answers` tokens, or `none`. If
            no objective of a pass reads all, `inputs.model.logits` is a `surgery.train.losses.LogitRows`.
        takes_weights: True if `loss` multiplies every term by `inputs.weights` at its token, where they are given. Then
            sources with this objective share forward passes.
    """

    name: str
    description: str = ""
    label: str = ""
    needs: tuple[str, ...] = ()
    in_nats: bool = False
    starts_at_zero: bool = False
    uses_temperature: bool = False
    reads_logits: Literal["all", "answers", "none"] = "all"
    takes_weights: bool = False

    @property
    def needs_splice(self) -> bool:
        """Whether it compares the attention of spliced heads. A model without a splice is trained without it."""
        return bool({"model.attention", "model.full_attention"} & set(self.needs))

    @property
    def needs_teacher(self) -> bool:
        """Whether it compares with a teacher."""
        return any(need.startswith("teacher.") for need in self.needs)

    def count(self, batch: Any) -> int:
        """Count the terms of the loss in a batch (a `surgery.data.encoding.EncodedBatch`)."""
        raise NotImplementedError

    def loss(self, inputs: Any) -> Any:
        """Compute the sum of the loss over its terms, from a `surgery.train.objectives.ObjectiveInputs`."""
        raise NotImplementedError


OBJECTIVES: Registry[ObjectiveInfo] = Registry("objective", ("surgery.train.objectives",))


def needs_of(names: Iterable[str]) -> set[str]:
    """Collect the `needs` of these objectives."""
    return {need for name in names for need in OBJECTIVES[name].needs}
