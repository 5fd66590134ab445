"""Compute the weighted losses of a batch: run the model, and the base and the teacher if objectives need them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.data.encoding import EncodedBatch
from surgery.errors import RunError
from surgery.recipe import Distil, Source
from surgery.recipe.objectives import OBJECTIVES, needs_of
from surgery.registry import plugin_errors
from surgery.train.divergence import TopK
from surgery.train.logits_cache import LogitsCache
from surgery.train.losses import rows_at_queries
from surgery.train.micro_batches import MicroBatch
from surgery.train.objectives import ObjectiveInputs, Outputs
from surgery.train.packing import separate_documents
from surgery.train.shared_prefix import SharedPrefix
from surgery.train.teacher import Teacher
from surgery.types import Graft


@dataclass(frozen=True)
class Targets:
    """Base, teacher and settings that the objectives of a stage compare the model with.

    Attributes:
        distil: settings of divergences.
        grafts: the spliced heads, by layer. Empty for a control and in pretraining.
        base: the frozen base, for objectives that need `base.logits`.
        prefix: the layers that the model shares with the base.
        teacher: for objectives that need `teacher.*`.
        cache: the teacher's logits on disk.
    """

    distil: Distil = field(default_factory=Distil)
    grafts: tuple[Graft, ...] = ()
    base: PreTrainedModel | None = None
    prefix: SharedPrefix | None = None
    teacher: Teacher | None = None
    cache: LogitsCache | None = None

    @property
    def frozen_models(self) -> tuple[PreTrainedModel | None, PreTrainedModel | None]:
        """The base and the teacher's model."""
        return self.base, self.teacher.model if self.teacher is not None else None

    def weighted_losses(
        self,
        model: nn.Module,
        source: Source,
        batch: EncodedBatch,
        counts: Mapping[str, float] | None = None,
        progress: float = 0.5,
    ) -> dict[str, Tensor]:
        """Compute the losses of the objectives that have a weight on this source, multiplied by their weights.

        Args:
            model: the model that is trained. May be wrapped by Accelerate.
            source: source of the batch.
            batch: documents on the model's device.
            counts: number of terms by which each loss is divided; the number in the batch by default.
            progress: position in the stage, from 0 to 1.
        """
        weights = source.weights.at(progress)
        objectives = self._objectives(weights)
        needs = needs_of(objective.name for objective in objectives)
        base, teacher = Outputs(), Outputs()
        run_base, skip = self._of_base(needs)
        if run_base is not None:
            with torch.no_grad(), separate_documents(self.base, batch.documents):
                base = Outputs(logits=run_base(batch.input_ids, batch.attention_mask))
        with skip(), separate_documents(model, batch.documents):
            options = model_options(needs, batch)
            output = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, **options)
        if self.teacher is not None:
            cached = self.cache.get(batch) if self.cache is not None and "teacher.logits" in needs else None
            teacher = self.teacher.outputs(batch, needs if cached is None else needs - {"teacher.logits"})
            teacher = self._with_cached_logits(teacher, cached, batch)
        losses = {}
        reads = [graft.reads for graft in self.grafts]
        for objective in objectives:
            outputs = self._model_outputs(output, objective.needs, batch, full="model.full_attention" in needs)
            inputs = ObjectiveInputs(batch, outputs, base, teacher, self.distil, reads)
            losses[objective.name] = weights[objective.name] * _mean_loss(objective, inputs, counts)
        if all(objective.needs_splice for objective in objectives):
            losses["none"] = output.logits.sum() * 0  # DDP requires that every parameter takes part
        return losses

    def joined_losses(self, model: nn.Module, group: Sequence[MicroBatch], progress: float) -> dict[str, Tensor]:
        """Compute the weighted losses of several micro-batches in one forward pass. See `join`.

        Args:
            model: as in `weighted_losses`.
            group: micro-batches whose objectives compare logits at most.
            progress: position in the stage, from 0 to 1.

        Returns:
            The sum over the group by objective.
        """
        width = max(part.batch.input_ids.shape[1] for part in group)
        ids, mask = (
            torch.cat([nn.functional.pad(x, (0, width - x.shape[1])) for x in rows])
            for rows in ([p.batch.input_ids for p in group], [p.batch.attention_mask for p in group])
        )
        needs = needs_of(name for part in group for name in part.source.weights.at(progress))
        run_base, skip = self._of_base(needs)
        with torch.no_grad():
            base_logits = run_base(ids, mask) if run_base is not None else None
        with skip():
            output = model(ids, attention_mask=mask, use_cache=False)
        sums: dict[str, Tensor] = {}
        start = 0
        for part in group:
            place = slice(start, start + len(part.batch)), slice(part.batch.input_ids.shape[1])
            start += len(part.batch)
            of_base = Outputs(logits=None if base_logits is None else base_logits[place])
            outputs = Outputs(logits=output.logits[place])
            inputs = ObjectiveInputs(part.batch, outputs, of_base, Outputs(), self.distil)
            for name, weight in part.source.weights.at(progress).items():
                loss = weight * _mean_loss(OBJECTIVES[name], inputs, part.counts)
                sums[name] = sums[name] + loss if name in sums else loss
        return sums

    def _objectives(self, weights: Mapping[str, float]) -> list[Any]:
        """Return the objectives that have a weight. Without spliced heads, those that need them are left out."""
        return [OBJECTIVES[name] for name in weights if self.grafts or not OBJECTIVES[name].needs_splice]

    def _of_base(
        self, needs: Collection[str]
    ) -> tuple[Callable[[Tensor, Tensor], Tensor] | None, Callable[[], AbstractContextManager[None]]]:
        """Return a function from tokens and mask to the base's logits, and a context for the model's pass after it.

        In the context, the model skips the layers that it shares with the base. Without objectives that need the base,
        there is no function.
        """
        base = self.base
        if "base.logits" not in needs:
            return None, nullcontext
        assert base is not None
        if self.prefix is not None:
            return self.prefix.base_logits, self.prefix.skipped
        return lambda ids, mask: base(ids, attention_mask=mask, use_cache=False).logits, nullcontext

    def _model_outputs(self, output: Any, needs: Collection[str], batch: EncodedBatch, full: bool) -> Outputs:
        """Select the outputs that one objective needs. `full`: the model's attention has the rows of all tokens."""
        outputs = Outputs(logits=output.logits)
        if "model.attention" in needs:
            rows = output.splice_attentions
            outputs = replace(outputs, attention=[rows_at_queries(x, batch) for x in rows] if full else rows)
        if "model.full_attention" in needs:
            outputs = replace(outputs, full_attention=output.splice_attentions)
        if "model.hidden_states" in needs:
            states = output.hidden_states
            if self.teacher is not None and self.teacher.layers:
                states = self.teacher.student_hidden(states)
            outputs = replace(outputs, hidden_states=states)
        return outputs

    def _with_cached_logits(self, teacher: Outputs, cached: TopK | None, batch: EncodedBatch) -> Outputs:
        """Replace the teacher's logits by those of the cache. New ones are stored first, so that all are rounded."""
        if self.cache is None or (cached is None and teacher.logits is None):
            return teacher
        if cached is None:
            assert self.distil.top_k is not None
            self.cache.put(batch, TopK.of(teacher.logits[batch.attention_mask.bool()], self.distil.top_k))
            cached = self.cache.get(batch)
        return replace(teacher, logits=cached)


def _mean_loss(objective: Any, inputs: ObjectiveInputs, counts: Mapping[str, float] | None) -> Tensor:
    """Divide the loss of an objective by its number of terms: the batch's own if `counts` is None."""
    count = objective.count(inputs.batch) if counts is None else counts[objective.name]
    with plugin_errors(f"objective {objective.name}", objective):
        loss = objective.loss(inputs)
    if not isinstance(loss, Tensor) or loss.ndim:
        kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        hint = "Return a tensor with one number: the sum over the terms."
        raise RunError(f"objective {objective.name}", f"its loss returned {kind}", hint)
    return loss / count


def model_options(needs: Collection[str], batch: EncodedBatch) -> dict[str, Any]:
    """Keyword arguments with which a hybrid returns the needed outputs.

    Args:
        needs: needs of the objectives, such as `model.attention`.
        batch: input of the model.
    """
    options: dict[str, Any] = {}
    if "model.full_attention" in needs:
        index = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
        options["splice_queries"] = index.expand(batch.input_ids.shape).where(batch.attention_mask.bool(), -1)
    elif "model.attention" in needs:
        options["splice_queries"] = batch.read_query
    if "model.hidden_states" in needs:
        options["output_hidden_states"] = True
    return options
