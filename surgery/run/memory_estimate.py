"""Estimate memory and FLOPs of a training step at true size, from shapes alone.

Forward pass, losses and backward pass run on the meta device and are metered there. Fused CUDA kernels, which save
less, are not taken into account.

Shape legend: B documents, T tokens, V vocabulary, H spliced heads of a layer, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from surgery.data.encoding import EncodedBatch, encode
from surgery.data.user import IndexedDocuments, open_source
from surgery.models.lookup import family_of
from surgery.models.meters import PassCost, extrapolate, measure
from surgery.models.torch_scans import torch_scans
from surgery.recipe import Source, Train, TrainStage
from surgery.recipe.objectives import OBJECTIVES, needs_of
from surgery.train.micro_batches import StepSplit
from surgery.train.optimizer import mark_trainable
from surgery.train.quantization import BITS_PER_WEIGHT, quantizable
from surgery.train.targets import Targets, logits_at, model_options
from surgery.train.teacher import Teacher
from surgery.types import Graft

SAMPLED_STEPS = 4  # steps to average the length of documents over
SHORT = (2, 4, 6)  # lengths at which a scan that loops over tokens is measured; the first two without attention
LOOPING = ("mamba1", "falcon_mamba")  # mixer kinds whose scan loops over tokens if there is no kernel
MOMENT_BYTES = 2 * 4  # AdamW: two fp32 moments per trained parameter
MASTER_BYTES = 4  # an fp32 copy of each trained parameter of a smaller dtype


@dataclass(frozen=True)
class SourceSample:
    """Documents that one source contributes to a step, on one process.

    Attributes:
        source: the source of the documents.
        batch: documents of the largest size that the source draws.
        tokens: mean number of tokens per step, without padding.
        columns: mean length of the batch, with padding.
        rows: mean number of documents per step; `batch` may have fewer.
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


def sample_sources(
    stage: TrainStage,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    processes: int = 1,
    micro_batch: int | None = None,
) -> tuple[SourceSample, ...]:
    """Draw documents from every source, with the generators and files that training uses.

    Args:
        stage: stage with the sources.
        seed: seed of the recipe.
        tokenizer: encodes the documents.
        processes: number of processes that share the documents of a step.
        micro_batch: maximum number of documents in a pass.

    Raises:
        ProbeError: the tokenizer cannot distinguish the choices of a probe.
    """
    samples = []
    for index, source in enumerate(stage.sources):
        high = source.pairs[1]
        largest = open_source(source.model_copy(update={"pairs": (high, high)}), tokenizer, seed, index)
        documents = largest.largest_step() if isinstance(largest, IndexedDocuments) else largest.step(0)
        batch = encode(documents[::processes][:micro_batch], tokenizer)
        stream = open_source(source, tokenizer, seed, index)
        steps = [stream.step(step)[::processes] for step in range(SAMPLED_STEPS)]
        masks = [encode(documents, tokenizer).attention_mask for documents in steps]
        tokens = sum(int(mask.sum()) for mask in masks) / SAMPLED_STEPS
        rows, columns = (sum(mask.shape[axis] for mask in masks) / SAMPLED_STEPS for axis in (0, 1))
        samples.append(SourceSample(source, batch, tokens, columns, rows))
    return tuple(samples)


@dataclass(frozen=True)
class Memory:
    """Bytes on one device while training.

    Attributes:
        weights: weights of the model; with `lora.quantization` those of 4 bits, without the copy in main memory.
        gradients: gradients of the trained parameters.
        optimizer: AdamW's two moments in fp32.
        master_copies: fp32 copies of trained parameters of a smaller dtype.
        frozen_base: weights of the base, if an objective compares with it.
        teacher: weights of the teacher, if an objective compares with it.
        activations: tensors that autograd saves for the largest pass, without fused kernels.
        temporaries: other tensors at the peak, without fused kernels.
    """

    weights: int
    gradients: int
    optimizer: int
    master_copies: int
    frozen_base: int
    teacher: int
    activations: int
    temporaries: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class StepCost:
    """Cost of one training step on one process.

    Attributes:
        memory: memory at the peak.
        largest: index of the source whose documents need the most memory.
        flops: FLOPs of matrix products, convolutions and attention, including backward pass, frozen base and teacher.
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
    samples: Sequence[SourceSample],
    number: int = 0,
    teacher: Teacher | None = None,
    processes: int = 1,
) -> StepCost:
    """Estimate the cost of a step by running its micro-batches on the meta device.

    Args:
        model: the model on the meta device. Its trained parameters are marked and get a gradient.
        base: the frozen base on the meta device, for objectives that need `base.logits`.
        grafts: the spliced heads.
        section: the recipe's section `train`.
        samples: documents of every source, from `sample_sources`.
        number: index of the stage in `section.sequence`.
        teacher: the teacher on the meta device, for objectives that need `teacher.*`.
        processes: number of processes that share the documents of a step.
    """
    stage = section.sequence[number]
    trained = mark_trainable(model, stage)
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    model.train()
    if base is not None:
        base.eval().requires_grad_(False)
    spliced = bool(grafts)
    runner = _Runner(model, samples, stage.needs if spliced else stage.needs - _OF_SPLICES)
    frozen = _Runner(base, samples, frozenset()) if base is not None else None
    targets = Targets(stage.distil, grafts, teacher=teacher)
    costs = [_source_cost(runner, frozen, targets, sample) for sample in samples]
    largest = max(range(len(costs)), key=lambda i: costs[i].peak)
    # Sources share passes, unless a pass has a few documents only.
    split = StepSplit(stage.sources, world=processes, packing=section.packing is not False)
    groups = split.groups() if section.micro_batch is None else [[index] for index in range(len(costs))]
    saved, peak = max(
        ((sum(costs[i].saved for i in group), sum(costs[i].peak for i in group)) for group in groups),
        key=lambda total: total[1],
    )
    is_quantized = stage.lora.quantization is not None
    memory = Memory(
        weights=weight_bytes(model, is_quantized),
        gradients=sum(p.nbytes for p in trained),
        optimizer=sum(p.numel() for p in trained) * MOMENT_BYTES,
        master_copies=sum(p.numel() for p in trained if p.element_size() < MASTER_BYTES) * MASTER_BYTES,
        frozen_base=weight_bytes(base, is_quantized) if base is not None else 0,
        teacher=weight_bytes(teacher.model) if teacher is not None else 0,
        activations=saved,
        temporaries=peak - saved,
    )
    flops = sum(
        cost.flops * sample.columns / sample.shape[1] * sample.rows / sample.shape[0]
        for cost, sample in zip(costs, samples, strict=True)
    )
    return StepCost(memory, largest, flops, sum(sample.tokens for sample in samples))


_OF_SPLICES = frozenset({"model.attention", "model.full_attention"})


def weight_bytes(model: PreTrainedModel, is_quantized: bool = False) -> int:
    """Count the bytes of parameters and buffers. Tied ones count once.

    Args:
        is_quantized: count the layers that `train.lora.quantization` quantizes as quantized.
    """
    layers = quantizable(model).values() if is_quantized else ()
    weights = {id(layer.weight): layer.weight for layer in layers}.values()
    saved = sum(weight.nbytes - math.ceil(weight.numel() * BITS_PER_WEIGHT / 8) for weight in weights)
    return sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers()) - saved


@dataclass(frozen=True)
class _SourceCost:
    """Cost of one micro-batch: saved bytes, peak bytes without weights, gradients and moments, and FLOPs."""

    saved: int
    peak: int
    flops: int


def _source_cost(runner: _Runner, frozen: _Runner | None, targets: Targets, sample: SourceSample) -> _SourceCost:
    """Measure the model and the losses separately, since only the model's scan may need extrapolation."""
    names = [name for name in sample.source.weights.at(0.5) if targets.grafts or not OBJECTIVES[name].needs_splice]
    needs = frozenset(needs_of(names))
    rows = targets.logit_rows({0: sample.source}, sample.batch)
    body, outputs = runner.cost(sample, needs, rows)
    base_cost, base_outputs = PassCost(0, 0, 0, 0, 0), None
    if "base.logits" in needs:
        assert frozen is not None
        with torch.no_grad():
            base_cost, base_outputs = frozen.cost(sample, frozenset())
    targets = replace(targets, base=base_outputs)  # type: ignore[arg-type]

    def losses() -> list[Tensor]:
        batch = sample.batch.to("meta")  # inside `measure`, which keeps the values of integers
        read = None if rows is None else rows.to("meta")
        found = targets.weighted_losses(outputs, {0: sample.source}, batch, counts, rows=read)
        return [torch.stack(list(found.values())).sum()]

    counts = {(0, name): 1.0 for name in names}  # they change no cost
    teacher = targets.teacher.model if targets.teacher is not None else None
    with torch_scans(teacher):
        loss = measure(losses, teacher)
    logits = outputs.output.logits.nbytes  # freed before the backward pass begins, unless they are saved
    peak = max(
        body.forward_peak,
        body.held + base_cost.forward_peak,
        body.held + base_cost.held + loss.forward_peak,
        body.saved + loss.backward_peak,
        body.backward_peak - logits,
    )
    return _SourceCost(body.saved + loss.saved, peak, body.flops + base_cost.flops + loss.flops)


class _Outputs(nn.Module):
    """Stand-in for a model that returns given outputs: leaf tensors on the meta device."""

    def __init__(self, output: ModelOutput) -> None:
        super().__init__()
        self.output = output

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        use_cache: bool = False,
        splice_queries: Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> ModelOutput:
        return self.output


class _Runner:
    """Measure one model on the batches of all sources.

    A scan that loops over tokens is measured at a few short lengths, on the source with the most documents. The cost
    at the real length is extrapolated by a polynomial, in proportion to the number of documents.
    """

    def __init__(self, model: PreTrainedModel, samples: Sequence[SourceSample], needs: frozenset[str]) -> None:
        self.model = model
        mixers = family_of(model.config).mixers(model.config)
        self._loops = any(spec.kind in LOOPING for spec in mixers)
        attends = bool(getattr(model.config, "splice", None)) or not all(spec.is_ssm for spec in mixers)
        self._lengths = SHORT if attends else SHORT[:2]
        self._widest = max(samples, key=lambda sample: sample.shape[0])
        self._needs = needs
        self._short: dict[int | None, list[PassCost]] = {}  # by the number of tokens whose logits are computed

    def cost(
        self, sample: SourceSample, needs: frozenset[str], logit_rows: Tensor | None = None
    ) -> tuple[PassCost, _Outputs]:
        """Measure the model on a batch. Also return a stand-in whose outputs have the same shapes.

        Args:
            logit_rows: (M,) tokens whose logits are computed; None for all.
        """
        rows, T = sample.shape
        if self._loops and max(SHORT) < T:
            share = rows / self._widest.shape[0]
            read = None if logit_rows is None else round(len(logit_rows) / share)
            if read not in self._short:
                all_read = None if read is None else torch.zeros(read, dtype=torch.long)
                self._short[read] = [self._measure(self._widest, n, self._needs, all_read) for n in self._lengths]
            cost = extrapolate(self._lengths, self._short[read], T).times(share)
        else:
            cost = self._measure(sample, T, needs, logit_rows)
        queries = T if "model.full_attention" in needs else sample.batch.read_query.shape[1]

        def leaf(like: Tensor, *shape: int) -> Tensor:
            return torch.empty(shape, dtype=like.dtype, device="meta", requires_grad=self._output.logits.requires_grad)

        tokens = (rows, T) if logit_rows is None else (1, len(logit_rows))
        output = ModelOutput(logits=leaf(self._output.logits, *tokens, self._output.logits.shape[2]))
        if _OF_SPLICES & needs:
            attentions = self._output.splice_attentions
            output["splice_attentions"] = tuple(leaf(a, rows, a.shape[1], queries, T) for a in attentions)
        if "model.hidden_states" in needs:
            output["hidden_states"] = tuple(leaf(h, rows, T, h.shape[2]) for h in self._output.hidden_states)
        return cost, _Outputs(output)

    def _measure(
        self, sample: SourceSample, length: int, needs: frozenset[str], logit_rows: Tensor | None = None
    ) -> PassCost:
        """Measure the last `length` columns, whose share of padding is that of the batch."""
        batch = sample.batch
        columns = {"input_ids": batch.input_ids[:, -length:], "attention_mask": batch.attention_mask[:, -length:]}

        def run() -> list[Tensor]:
            shortened = replace(batch, **columns, read_query=batch.read_query.clamp(max=length - 1)).to("meta")
            options = model_options(needs, shortened)
            with logits_at(self.model, None if logit_rows is None else logit_rows.to("meta")):
                self._output = self.model(
                    shortened.input_ids, attention_mask=shortened.attention_mask, use_cache=False, **options
                )
            states = self._output.hidden_states if "model.hidden_states" in needs else ()
            return [self._output.logits, *(self._output.splice_attentions if _OF_SPLICES & needs else ()), *states]

        with torch_scans(self.model):
            return measure(run, self.model)
