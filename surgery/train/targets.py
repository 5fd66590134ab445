"""Compute the weighted losses of a batch: run the model, and the base and the teacher if objectives need them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from surgery.train.losses import LogitRows, answer_rows, rows_at_queries
from surgery.train.micro_batches import Counts
from surgery.train.objectives import ObjectiveInputs, Outputs
from surgery.train.own_inputs import OwnInputs
from surgery.train.packing import separate_documents
from surgery.train.shared_prefix import SharedPrefix
from surgery.train.teacher import Teacher, layer_outputs
from surgery.types import Graft


@dataclass(frozen=True)
class Targets:
    """Base, teacher and settings that the objectives of a stage compare the model with."""

    distil: Distil = field(default_factory=Distil)  # settings of divergences
    grafts: tuple[Graft, ...] = ()  # the spliced heads, by layer; none in a control and in pretraining
    base: PreTrainedModel | None = None  # frozen
    prefix: SharedPrefix | None = None  # the layers that the model shares with the base
    own_inputs: OwnInputs | None = None  # with `trainable: reads`
    teacher: Teacher | None = None
    cache: LogitsCache | None = None  # the teacher's logits on disk

    @property
    def frozen_models(self) -> tuple[PreTrainedModel | None, PreTrainedModel | None]:
        """The base and the teacher's model."""
        return self.base, self.teacher.model if self.teacher is not None else None

    def logit_rows(self, sources: Mapping[int, Source], batch: EncodedBatch) -> Tensor | None:
        """Return the tokens whose logits the objectives of these sources read, as (M,) indices in the flattened batch.

        On the CPU, if the batch is there: then no GPU has to be waited for. None for all tokens.
        """
        names = {name for source in sources.values() for name in source.weights.at(0.5)}
        if any(objective.reads_logits == "all" for objective in self.objectives(names)):
            return None
        return answer_rows(batch)

    def weighted_losses(
        self,
        model: nn.Module,
        sources: Mapping[int, Source],
        batch: EncodedBatch,
        counts: Counts,
        progress: float = 0.5,
        rows: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Compute the losses of the objectives that have a weight on these sources, multiplied by their weights.

        Args:
            model: the model that is trained. May be wrapped by Accelerate.
            sources: sources of the batch, by index in the stage.
            batch: documents on the model's device.
            counts: number of terms by which each loss is divided.
            progress: position in the stage, from 0 to 1.
            rows: those of `logit_rows`, if the model computes no other logits: inside `logits_at`.

        Returns:
            The sum over the sources, by objective.
        """
        weights = {index: source.weights.at(progress) for index, source in sources.items()}
        objectives = self.objectives(dict.fromkeys(name for names in weights.values() for name in names))
        needs = needs_of(objective.name for objective in objectives)
        base, skips_prefix = self._of_base(batch, needs)
        own = nullcontext() if self.own_inputs is None else self.own_inputs.running()
        with skips_prefix, own, separate_documents(model, batch.documents):
            options = model_options(needs, batch)
            output = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, **options)
        outputs, teacher = self._of_model(output, batch, needs, rows), self._of_teacher(batch, needs)
        losses, reads = {}, [graft.reads for graft in self.grafts]
        for objective in objectives:
            name = objective.name
            factors = {i: given[name] / counts[i, name] if name in given else 0.0 for i, given in weights.items()}
            inputs = ObjectiveInputs(batch, outputs, base, teacher, self.distil, reads)
            losses[name] = _weighted(objective, inputs, factors)
        if all(objective.needs_splice for objective in objectives):
            apart = self.own_inputs
            # DDP requires that every parameter takes part.
            losses["none"] = apart.zero() if apart is not None and apart.is_sharded else output.logits.sum() * 0
        return losses

    def objectives(self, names: Iterable[str]) -> list[Any]:
        """Return the objectives of these names. Without spliced heads, those that need them are left out."""
        return [OBJECTIVES[name] for name in names if self.grafts or not OBJECTIVES[name].needs_splice]

    def _of_base(self, batch: EncodedBatch, needs: Collection[str]) -> tuple[Outputs, AbstractContextManager[None]]:
        """Run the base, and return a context in which the model skips the layers that it shares with the base."""
        if "base.logits" not in needs:
            return Outputs(), nullcontext()
        assert self.base is not None
        with torch.no_grad(), separate_documents(self.base, batch.documents):
            if self.prefix is not None and "model.hidden_states" not in needs:  # those below would be missing
                return Outputs(self.prefix.base_logits(batch.input_ids, batch.attention_mask)), self.prefix.skipped()
            output = self.base(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
            return Outputs(output.logits), nullcontext()

    def _of_model(self, output: Any, batch: EncodedBatch, needs: Collection[str], rows: Tensor | None) -> Outputs:
        """Select the outputs that the objectives need."""
        logits = output.logits if rows is None else LogitRows(output.logits[0], rows)
        full = output.splice_attentions if "model.full_attention" in needs else ()
        attention = output.splice_attentions if "model.attention" in needs else ()
        if full:
            attention = [rows_at_queries(rows_BHTT, batch) for rows_BHTT in attention]
        states = output.hidden_states if "model.hidden_states" in needs else ()
        if states and self.teacher is not None and self.teacher.layers:
            states = layer_outputs(self.teacher.student, states, self.teacher.layers)
        return Outputs(logits, attention, full, states)

    def _of_teacher(self, batch: EncodedBatch, needs: set[str]) -> Outputs:
        """Run the teacher, unless its logits are on disk and nothing else is needed."""
        if self.teacher is None:
            return Outputs()
        if self.cache is None or "teacher.logits" not in needs:
            return self.teacher.outputs(batch, needs)
        cached = self.cache.get(batch)
        outputs = self.teacher.outputs(batch, needs if cached is None else needs - {"teacher.logits"})
        if cached is None:  # new logits are stored first and read again, so that all are rounded
            assert self.distil.top_k is not None
            self.cache.put(batch, TopK.of(outputs.logits[batch.attention_mask.bool()], self.distil.top_k))
            cached = self.cache.get(batch)
        return replace(outputs, logits=cached)


def _weighted(objective: Any, inputs: ObjectiveInputs, factors: Mapping[int, float]) -> Tensor:
    """Compute the loss of an objective, with the terms of each source multiplied by its factor.

    A factor of 0 is that of a source without the objective, whose tokens have no terms.
    """
    scale = 1.0
    if len(factors) == 1:
        (scale,) = factors.values()
    else:
        assert inputs.batch.sources is not None
        table = torch.tensor([factors.get(index, 0.0) for index in range(max(factors) + 1)])
        weights = table.to(inputs.batch.sources.device, non_blocking=True)[inputs.batch.sources]
        inputs = replace(inputs, weights=weights)
    with plugin_errors(f"objective {objective.name}", objective):
        loss = objective.loss(inputs)
    if not isinstance(loss, Tensor) or loss.ndim:
        kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        hint = "Return a tensor with one number: the sum over the terms."
        raise RunError(f"objective {objective.name}", f"its loss returned {kind}", hint)
    return loss * scale


@contextmanager
def logits_at(model: nn.Module, rows_M: Tensor | None) -> Iterator[None]:
    """Let a causal language model compute the logits of these tokens of the flattened batch only, as (1,M,V).

    The logits of all tokens may take more memory and time than the layers, if the vocabulary is large. None computes
    them all.
    """
    if rows_M is None:
        yield
        return
    head = next(module for module in model.modules() if isinstance(module, PreTrainedModel)).get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, given: (given[0].flatten(0, 1)[rows_M][None], *given[1:]))
    try:
        yield
    finally:
        handle.remove()


def model_options(needs: Collection[str], batch: EncodedBatch) -> dict[str, Any]:
    """Keyword arguments with which a hybrid returns what objectives need of it, such as `model.attention`."""
    options: dict[str, Any] = {}
    if "model.full_attention" in needs:
        index = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
        options["splice_queries"] = index.expand(batch.input_ids.shape).where(batch.attention_mask.bool(), -1)
    elif "model.attention" in needs:
        options["splice_queries"] = batch.read_query
    if "model.hidden_states" in needs:
        options["output_hidden_states"] = True
    return options
