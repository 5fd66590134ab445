"""Training objectives, one class each. Schema, counts, labels and cost estimates are derived from these classes.

A recipe is validated against this module, so it does not import torch. The formulas are in `losses`.
Shape legend: B documents, T tokens, R reads (one for each answer token), H spliced heads of a layer, V vocabulary, D
model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from surgery.errors import RecipeError
from surgery.recipe.objectives import NEEDS, OBJECTIVES, ObjectiveInfo

if TYPE_CHECKING:
    from torch import Tensor

    from surgery.data.encoding import EncodedBatch
    from surgery.recipe import Distil
    from surgery.types import Reads


@dataclass(frozen=True)
class Outputs:
    """Outputs of one model on a batch. Outputs that no objective needs are empty.

    Attributes:
        logits: (B,T,V). With `distil.cache`, the teacher's logits are a `TopK`. Where no objective reads the model's
            logits of all tokens, they are a `LogitRows`.
        attention: for each spliced layer, (B,H,R,T) rows at `batch.read_query`. For a teacher, those of the aligned
            heads.
        full_attention: for each spliced layer, (B,H,T,T).
        hidden_states: (B,T,D) of each compared layer.
    """

    logits: Any = None
    attention: Sequence[Tensor] = ()
    full_attention: Sequence[Tensor] = ()
    hidden_states: Sequence[Tensor] = ()


@dataclass(frozen=True)
class ObjectiveInputs:
    """Inputs of an objective.

    Attributes:
        batch: documents as tensors.
        model: outputs of the model that is trained.
        base: outputs of the frozen base, if the objective needs `base.logits`.
        teacher: outputs of the teacher, if the objective needs `teacher.*`.
        distil: settings of divergences.
        reads: for each spliced layer and head, the gold position that it should attend to.
        weights: (B,T) factor for the terms of each token, in a batch of several sources; None for 1 everywhere. Only
            objectives with `takes_weights` get one.
    """

    batch: EncodedBatch
    model: Outputs
    base: Outputs
    teacher: Outputs
    distil: Distil
    reads: Sequence[Sequence[Reads]] = ()
    weights: Tensor | None = None


class Objective(ObjectiveInfo, ABC):
    """Base class of training objectives. Subclass it, implement `count` and `loss`, and register the class."""

    @abstractmethod
    def count(self, batch: EncodedBatch) -> int:
        """Number of terms of the loss in a batch, such as its tokens or reads."""

    @abstractmethod
    def loss(self, inputs: ObjectiveInputs) -> Tensor:
        """Sum of the loss over the terms that `count` counts.

        The training loop divides it by the number of terms of the whole step, over all micro-batches and processes,
        and multiplies it by the weight. It must depend on the model's outputs even if the batch has no term.
        """


O = TypeVar("O", bound=type[Objective])  # noqa: E741


def register_objective(name: str) -> Callable[[O], O]:
    """Class decorator: register a subclass of `Objective` under its name in a recipe's `weights`.

    Raises:
        RecipeError: another objective has this name, or `needs` has an unknown name.
    """

    def register(objective: O) -> O:
        entry = objective()
        unknown = sorted(set(entry.needs) - NEEDS)
        if unknown:
            raise RecipeError(f"objective {name}: needs", unknown[0], f"Use names among {', '.join(sorted(NEEDS))}.")
        entry.name = name
        entry.label = entry.label or name
        OBJECTIVES.register(name, entry)
        return objective

    return register


def _losses() -> ModuleType:
    """The formulas. A recipe is validated without them, since they import torch."""
    return import_module("surgery.train.losses")


class _Own(Objective):
    """An objective of this package: the formula of its name in `losses`, by default with one term for each token."""

    def count(self, batch: EncodedBatch) -> int:
        return int(batch.attention_mask.sum())

    def loss(self, inputs: ObjectiveInputs) -> Tensor:
        loss: Tensor = getattr(_losses(), f"{self.name}_loss")(inputs)
        return loss


@register_objective("answer")
class Answer(_Own):
    description = "Cross-entropy on the tokens of answers."
    needs = ("answers",)
    reads_logits = "answers"
    in_nats = takes_weights = True

    def count(self, batch: EncodedBatch) -> int:
        return len(_losses().answer_rows(batch))


@register_objective("attention")
class Attention(_Own):
    description = "Cross-entropy of the new heads' attention at the gold position of every answer token."
    needs = ("gold_positions", "model.attention")
    reads_logits = "none"
    takes_weights = True

    def count(self, batch: EncodedBatch) -> int:
        return int(_losses().has_gold_positions(batch).sum())


@register_objective("base_kl")
class BaseKL(_Own):
    description = "Divergence from the frozen base's next-token distribution, on every token."
    needs = ("base.logits",)
    in_nats = uses_temperature = takes_weights = True
    starts_at_zero = True


@register_objective("lm")
class LanguageModelling(_Own):
    description = "Cross-entropy on every token: language modelling."
    in_nats = takes_weights = True

    def count(self, batch: EncodedBatch) -> int:
        return int(batch.same_document.sum())


@register_objective("distil")
class Distillation(_Own):
    description = "Divergence from the teacher's next-token distribution, on every token."
    needs = ("teacher.logits",)
    in_nats = uses_temperature = takes_weights = True


@register_objective("attention_kl")
class AttentionKL(_Own):
    description = (
        "KL divergence of the new heads' attention from that of the teacher's heads, before every answer token."
    )
    needs = ("answers", "model.attention", "teacher.attention")
    reads_logits = "none"
    takes_weights = True

    def count(self, batch: EncodedBatch) -> int:
        return int((batch.read_query >= 0).sum())


@register_objective("attention_mse")
class AttentionMSE(_Own):
    description = "Squared distance of the new heads' attention matrices from the teacher's (MOHAWK, stage 1)."
    needs = ("model.full_attention", "teacher.full_attention")
    reads_logits = "none"


@register_objective("hidden_mse")
class HiddenMSE(_Own):
    description = "Distance of the output of every layer from that of the teacher's layer (MOHAWK, stage 2)."
    needs = ("model.hidden_states", "teacher.hidden_states")
    reads_logits = "none"
