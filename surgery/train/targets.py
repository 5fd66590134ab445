"""Compute the weighted losses of a batch: run the model, and the base and the teacher if objectives need them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
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
        objectives = [OBJECTIVES[name] for name in weights if self.grafts or not OBJECTIVES[name].needs_splice]
        needs = needs_of(objective.name for objective in objectives)
        tokens = {"attention_mask": batch.attention_mask, "use_cache": False}
        base, teacher = Outputs(), Outputs()
        with ExitStack() as stack, separate_documents(model, batch.documents):
            if "base.logits" in needs:
                assert self.base is not None
                with torch.no_grad(), separate_documents(self.base, batch.documents):
                    if self.prefix is None:
                        base = Outputs(logits=self.base(batch.input_ids, **tokens).logits)
                    else:
                        base = Outputs(logits=self.prefix.base_logits(batch.input_ids, batch.attention_mask))
                        stack.enter_context(self.prefix.skipped())
            output = model(batch.input_ids, **tokens, **model_options(needs, batch))
        if self.teacher is not None:
            cached = self.cache.get(batch) if self.cache is not None and "teacher.logits" in needs else None
            teacher = self.teacher.outputs(batch, needs if cached is None else needs - {"teacher.logits"})
            teacher = self._with_cached_logits(teacher, cached, batch)
        reads = [graft.reads for graft in self.grafts]
        losses = {}
        for objective in objectives:
            outputs = self._model_outputs(output, objective.needs, batch, full="model.full_attention" in needs)
            inputs = ObjectiveInputs(batch, outputs, base, teacher, self.distil, reads)
            count = objective.count(batch) if counts is None else counts[objective.name]
            with plugin_errors(f"objective {objective.name}", objective):
                loss = objective.loss(inputs)
            if not isinstance(loss, Tensor) or loss.ndim:
                kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                hint = "Return a tensor with one number: the sum over the terms."
                raise RunError(f"objective {objective.name}", f"its loss returned {kind}", hint)
            losses[objective.name] = weights[objective.name] * (loss / count)
        if all(objective.needs_splice for objective in objectives):
            losses["none"] = output.logits.sum() * 0  # DDP requires that every parameter takes part
        return losses

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
