"""What training costs at true size, from shapes alone. Owns: micro-batches, memory and FLOPs of a step, cache bytes.

Must never know: weights, files, printing. The model lies on the meta device; its own forward pass, the training's own
losses and the backward pass run there, and meters watch. All of it is without fused CUDA kernels, which keep less.

Shape legend: B documents, T tokens, V vocabulary, Q questions, H spliced heads of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from surgery.data.encoding import EncodedBatch, encode
from surgery.data.user import open_source
from surgery.models.lookup import family_of
from surgery.models.meters import PassCost, extrapolate, measure
from surgery.recipe import Source, Train, TrainStage
from surgery.train.optimizer import trainable
from surgery.train.trainer import Trainer
from surgery.train.training import make_accelerator
from surgery.types import Graft

SAMPLED_STEPS = 4  # whose documents give the mean length
SHORT = (
    2,
    4,
    6,
)  # tokens: a scan that loops over them is run at these lengths and extrapolated; at two without attention
LOOPING = ("mamba1", "falcon_mamba")  # kinds whose scan loops over tokens without kernels
MOMENT_BYTES = 2 * 4  # AdamW: two fp32 moments for each trained number
MASTER_BYTES = 4  # an fp32 copy of each trained number that is stored in less


@dataclass(frozen=True)
class MicroBatch:
    """What one source contributes to a step, on one process.

    Attributes:
        batch: documents of the largest size that the source draws.
        tokens: mean number of tokens a step, without padding.
        columns: mean length of the batch, padding included.
        rows: mean number of documents a step; `batch` may hold fewer.
    """

    source: Source
    batch: EncodedBatch
    tokens: float
    columns: float
    rows: float

    @property
    def shape(self) -> tuple[int, int]:
        """(B,T) of `batch`."""
        rows, columns = self.batch.input_ids.shape
        return rows, columns


def micro_batches(
    stage: TrainStage, seed: int, tokenizer: PreTrainedTokenizerBase, processes: int = 1, at_once: int | None = None
) -> tuple[MicroBatch, ...]:
    """The sources of a step, from the generators and files that training uses.

    Args:
        at_once: documents of a source that go through the model together, at most.

    Raises:
        ProbeError: the tokenizer cannot tell the choices of a probe apart.
    """
    found = []
    for index, source in enumerate(stage.sources):
        high = source.pairs[1]
        largest = open_source(source.model_copy(update={"pairs": (high, high)}), tokenizer, seed, index)
        batch = encode(largest.step(0)[::processes][:at_once], tokenizer)
        stream = open_source(source, tokenizer, seed, index)
        drawn = [stream.step(step)[::processes] for step in range(SAMPLED_STEPS)]
        masks = [encode(documents, tokenizer).attention_mask for documents in drawn]
        tokens, columns, rows = (
            sum(f(mask) for mask in masks) / SAMPLED_STEPS
            for f in (lambda m: int(m.sum()), lambda m: m.shape[1], lambda m: m.shape[0])
        )
        found.append(MicroBatch(source, batch, tokens, columns, rows))
    return tuple(found)


@dataclass(frozen=True)
class Memory:
    """Bytes on one device while training.

    Attributes:
        weights, gradients: of the model, and of what trains.
        optimizer: AdamW's two moments in fp32; `master_copies`: of what trains in less than fp32.
        frozen_base: the base beside the model, which `keep` compares with.
        activations: what autograd keeps of the largest micro-batch, without kernels.
        temporaries: what is alive beside them at the worst moment, without kernels.
    """

    weights: int
    gradients: int
    optimizer: int
    master_copies: int
    frozen_base: int
    activations: int
    temporaries: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class StepCost:
    """One step of training on one process.

    Attributes:
        largest: index of the source whose micro-batch needs most.
        flops: matrix products, convolutions and attention, backward pass and frozen base included.
        tokens: mean number of tokens, without padding.
    """

    memory: Memory
    largest: int
    flops: float
    tokens: float


def step_cost(
    model: PreTrainedModel,
    base: PreTrainedModel | None,
    grafts: tuple[Graft, ...],
    section: Train,
    batches: Sequence[MicroBatch],
    number: int = 0,
) -> StepCost:
    """Runs every micro-batch of a step on the meta device.

    Args:
        model: on the meta device; what trains is marked and gets a gradient.
        base: the frozen base on the meta device, needed where a source gives `keep` a weight.
        number: of the stage in `section.sequence`.
    """
    trained = trainable(model, section.sequence[number])
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    model.train()
    if base is not None:
        base.eval().requires_grad_(False)
    supervised = any(_is_supervised(micro.source, grafts) for micro in batches)
    runner = _Runner(model, batches, supervised)
    frozen = _Runner(base, batches, supervised=False) if base is not None else None
    costs = [_source_cost(runner, frozen, grafts, section, micro) for micro in batches]
    largest = max(range(len(costs)), key=lambda i: costs[i].peak)
    memory = Memory(
        weights=weight_bytes(model),
        gradients=sum(p.nbytes for p in trained),
        optimizer=sum(p.numel() for p in trained) * MOMENT_BYTES,
        master_copies=sum(p.numel() for p in trained if p.element_size() < MASTER_BYTES) * MASTER_BYTES,
        frozen_base=weight_bytes(base) if base is not None else 0,
        activations=costs[largest].saved,
        temporaries=costs[largest].peak - costs[largest].saved,
    )
    flops = sum(
        cost.flops * micro.columns / micro.shape[1] * micro.rows / micro.shape[0]
        for cost, micro in zip(costs, batches, strict=True)
    )
    return StepCost(memory, largest, flops, sum(micro.tokens for micro in batches))


def weight_bytes(model: nn.Module) -> int:
    """Of its parameters and buffers, tied ones once."""
    return sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())


@dataclass(frozen=True)
class _SourceCost:
    """Of one micro-batch: bytes saved, most bytes alive beside weights, gradients and moments, FLOPs."""

    saved: int
    peak: int
    flops: int


def _is_supervised(source: Source, grafts: tuple[Graft, ...]) -> bool:
    return source.weights.uses("attention") and bool(grafts)


def _source_cost(
    runner: _Runner, frozen: _Runner | None, grafts: tuple[Graft, ...], section: Train, micro: MicroBatch
) -> _SourceCost:
    """Model and losses one after the other: the model's scan may have to be extrapolated, the losses never."""
    body, outputs = runner.cost(micro, _is_supervised(micro.source, grafts))
    kept, kept_outputs = PassCost(0, 0, 0, 0, 0), None
    if micro.source.weights.uses("keep"):
        assert frozen is not None
        with torch.no_grad():
            kept, kept_outputs = frozen.cost(micro, supervised=False)
    loss = _loss_cost(outputs, kept_outputs, grafts, section, micro)
    logits = outputs.output.logits.nbytes  # freed before the backward pass begins, unless they are saved
    peak = max(
        body.forward_peak,
        body.held + kept.forward_peak,
        body.held + kept.held + loss.forward_peak,
        body.saved + loss.backward_peak,
        body.backward_peak - logits,
    )
    return _SourceCost(body.saved + loss.saved, peak, body.flops + kept.flops + loss.flops)


class _Outputs(nn.Module):
    """Stands in for a model whose outputs are known by shape: leaves on the meta device."""

    def __init__(self, logits: Tensor, splice_attentions: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.output = ModelOutput(logits=logits, splice_attentions=splice_attentions)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        use_cache: bool = False,
        splice_queries: Tensor | None = None,
    ) -> ModelOutput:
        return self.output


class _Runner:
    """Runs one model on micro-batches.

    A scan that loops over tokens is run on a few short lengths, once, with the most documents; the cost at the real
    length is the polynomial through them, and goes with the number of documents.
    """

    def __init__(self, model: PreTrainedModel, batches: Sequence[MicroBatch], supervised: bool) -> None:
        self.model = model
        mixers = family_of(model.config).mixers(model.config)
        self._loops = any(spec.kind in LOOPING for spec in mixers)
        attends = bool(getattr(model.config, "splice", None)) or not all(spec.is_ssm for spec in mixers)
        self._lengths = SHORT if attends else SHORT[:2]
        self._widest = max(batches, key=lambda micro: micro.shape[0])
        self._supervised = supervised
        self._short: list[PassCost] = []
        self._outputs: list[Tensor] = []

    def cost(self, micro: MicroBatch, supervised: bool) -> tuple[PassCost, _Outputs]:
        """The model on a micro-batch, and what stands in for its outputs there."""
        rows, T = micro.shape
        if self._loops and max(SHORT) < T:
            self._short = self._short or [self._measure(self._widest, n, self._supervised) for n in self._lengths]
            cost = extrapolate(self._lengths, self._short, T).times(rows / self._widest.shape[0])
        else:
            cost = self._measure(micro, T, supervised)
        logits, *attentions = self._outputs
        questions = micro.batch.query.shape[1]
        shapes: list[tuple[int, ...]] = [(rows, T, logits.shape[2])]
        shapes += [(rows, a.shape[1], questions, T) for a in attentions] if supervised else []
        trains = logits.requires_grad
        leaves = [
            torch.empty(shape, dtype=like.dtype, device="meta", requires_grad=trains)
            for shape, like in zip(shapes, self._outputs, strict=False)
        ]
        return cost, _Outputs(leaves[0], tuple(leaves[1:]))

    def _measure(self, micro: MicroBatch, length: int, supervised: bool) -> PassCost:
        """On the last columns: where documents differ in length these hold padding, as the whole batch does."""
        batch = micro.batch

        def run() -> list[Tensor]:
            ids, mask = (x[:, -length:].to("meta") for x in (batch.input_ids, batch.attention_mask))
            extra = {"splice_queries": batch.query.clamp(max=length - 1).to("meta")} if supervised else {}
            output = self.model(ids, attention_mask=mask, use_cache=False, **extra)
            self._outputs = [output.logits, *(output.splice_attentions if supervised else ())]
            return self._outputs

        return measure(run, self.model)


def _loss_cost(
    outputs: _Outputs, frozen: _Outputs | None, grafts: tuple[Graft, ...], section: Train, micro: MicroBatch
) -> PassCost:
    """The losses of training itself, on leaves in place of the model's outputs."""
    tokenizer: Any = None
    trainer = Trainer(outputs, tokenizer, section, 0, None, make_accelerator(), frozen, grafts)  # type: ignore[arg-type]

    def run() -> list[Tensor]:
        terms = trainer.losses(outputs, micro.source, micro.batch.to("meta"))
        return [torch.stack(list(terms.values())).sum()]

    return measure(run)
