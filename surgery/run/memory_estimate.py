"""Estimate memory and FLOPs of a training step at true size, from shapes alone.

Forward pass, losses and backward pass run on the meta device and are metered there. Fused CUDA kernels, which save
less, are not taken into account.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.encoding import EncodedBatch, encode
from surgery.data.user import IndexedDocuments, open_source
from surgery.models.lookup import family_of
from surgery.models.meters import FusedAttention, PassCost, measure
from surgery.models.torch_scans import torch_scans
from surgery.recipe import Source, Train, TrainStage
from surgery.train.lora import Adapters
from surgery.train.micro_batches import StepSplit
from surgery.train.numerics import precision_of
from surgery.train.optimizer import mark_trainable
from surgery.train.own_inputs import OwnInputs
from surgery.train.quantization import BITS_PER_WEIGHT, quantizable
from surgery.train.targets import Targets, logits_at
from surgery.train.teacher import Teacher
from surgery.types import Graft

SAMPLED_STEPS = 4  # steps to average the length of documents over
LOOPING, CUT = ("mamba1", "falcon_mamba"), 16  # mixers whose scan loops over tokens are measured at the last tokens
MOMENT_BYTES = 2 * 4  # AdamW: two fp32 moments per trained parameter
_PRODUCTS = frozenset([
    F.linear, F.conv1d, F.scaled_dot_product_attention, torch.bmm, torch.conv1d, torch.einsum, torch.matmul,
    Tensor.__matmul__, Tensor.matmul,
])  # fmt: skip
MASTER_BYTES = 4  # an fp32 copy of each trained parameter of a smaller dtype


@dataclass(frozen=True)
class SourceSample:
    """Documents that one source contributes to a step, on one process. Numbers are means over steps."""

    source: Source
    batch: EncodedBatch  # of the largest size that the source draws
    tokens: float  # without padding
    columns: float  # length of the batch, with padding
    rows: float  # number of documents; `batch` may have fewer


def sample_sources(
    stage: TrainStage, seed: int, tokenizer: PreTrainedTokenizerBase, processes: int = 1, micro_batch: int | None = None
) -> tuple[SourceSample, ...]:
    """Draw documents from every source, with the generators and files that training uses.

    Args:
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
class StepCost:
    """Cost of one training step on one process.

    `memory` has the bytes on one device at the peak, by what holds them: `weights` (with `lora.quantization` those of 4
    bits, without the copy in main memory), `gradients`, `optimizer` (two moments in fp32), `master_copies` (in fp32, of
    trained parameters of a smaller dtype), `frozen_base`, `teacher`, `activations` (saved for the backward pass of the
    largest micro-batch) and `temporaries`.
    """

    memory: dict[str, int]
    largest: int  # index of the source whose documents need the most memory
    flops: float  # of matrix products, convolutions and attention, with backward pass, frozen base and teacher
    tokens: float  # mean number, without padding
    trained: int  # number of parameters that train

    @property
    def total(self) -> int:
        return sum(self.memory.values())


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
    """Estimate the cost of a step of `section.sequence[number]` by running its micro-batches on the meta device.

    All models are on the meta device: the one to train, whose parameters are marked and get a gradient, the frozen base
    and the teacher for objectives that need their logits. `samples` come from `sample_sources`.
    """
    stage, plain = section.sequence[number], model
    if stage.trainable == "lora":
        model = copy.deepcopy(plain)  # stages share it
        Adapters(model, stage.lora, grafts)
    trained = mark_trainable(model, stage)
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    model.train()
    kernels = _Bf16Products if precision_of(section, model) == "bf16" else FusedAttention
    if section.gradient_checkpointing:
        # Modes of `measure` do not reach the backward pass, where blocks are computed again.
        arguments = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), kernels())}
        model.gradient_checkpointing_enable(arguments)
    if base is not None:
        base.eval().requires_grad_(False)
    own_inputs = OwnInputs(model) if stage.trainable == "reads" else None
    targets = Targets(stage.distil, grafts, base, own_inputs=own_inputs, teacher=teacher)
    if own_inputs is not None:
        _pass_cost(model, targets, samples[0], kernels)  # the first pass runs layers that the others skip
    costs = [_pass_cost(model, targets, sample, kernels) for sample in samples]
    peaks = [max(cost.forward_peak, cost.backward_peak) for cost in costs]
    # Sources share passes, unless a pass has a few documents only.
    split = StepSplit(stage.sources, world=processes, packing=section.packing is not False)
    groups = split.groups() if section.micro_batch is None else [[index] for index in range(len(costs))]
    heaviest = max(groups, key=lambda group: sum(peaks[i] for i in group))
    peak, is_quantized = sum(peaks[i] for i in heaviest), stage.lora.quantization is not None
    saved = min(peak, sum(costs[i].saved for i in heaviest))  # some is freed before the peak
    memory = {
        "weights": weight_bytes(plain, is_quantized),
        "gradients": sum(p.nbytes for p in trained),
        "optimizer": sum(p.numel() for p in trained) * MOMENT_BYTES,
        "master_copies": sum(p.numel() for p in trained if p.element_size() < MASTER_BYTES) * MASTER_BYTES,
        "frozen_base": weight_bytes(base, is_quantized) if base is not None else 0,
        "teacher": weight_bytes(teacher.model) if teacher is not None else 0,
        "activations": saved,
        "temporaries": peak - saved,
    }
    flops = sum(
        cost.flops * sample.columns * sample.rows / sample.batch.input_ids.numel()
        for cost, sample in zip(costs, samples, strict=True)
    )
    tokens = sum(sample.tokens for sample in samples)
    return StepCost(memory, peaks.index(max(peaks)), flops, tokens, sum(p.numel() for p in trained))


def weight_bytes(model: PreTrainedModel, is_quantized: bool = False) -> int:
    """Count the bytes of parameters and buffers, tied ones once; those of layers that QLoRA quantizes as quantized."""
    layers = quantizable(model).values() if is_quantized else ()
    weights = {id(layer.weight): layer.weight for layer in layers}.values()
    saved = sum(weight.nbytes - math.ceil(weight.numel() * BITS_PER_WEIGHT / 8) for weight in weights)
    return sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers()) - saved


class _Bf16Products(FusedAttention):
    """Run matrix products on meta tensors in bf16, since `torch.autocast` does not apply to them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            args, kwargs = tree_map(_as_bf16, (args, kwargs))
        return super().__torch_function__(func, types, args, kwargs)


def _as_bf16(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value


def _pass_cost(
    model: PreTrainedModel, targets: Targets, sample: SourceSample, kernels: type[FusedAttention]
) -> PassCost:
    """Measure forward pass, losses and backward pass of one micro-batch, with the frozen models."""
    batch, factor = sample.batch, 1.0
    loops = any(spec.kind in LOOPING for spec in family_of(model.config).mixers(model.config))
    if loops and batch.input_ids.shape[1] > CUT:  # a loop of thousands of tokens would take minutes
        batch, factor = last_tokens(batch, CUT), batch.input_ids.shape[1] / CUT
    rows = targets.logit_rows({0: sample.source}, batch)
    counts = {(0, name): 1.0 for name in sample.source.weights.at(0.5)}  # they change no cost

    def losses() -> list[Tensor]:
        on_meta = batch.to("meta")  # inside `measure`, which keeps the values of integers
        read = None if rows is None else rows.to("meta")
        with kernels(), logits_at(model, read):
            found = targets.weighted_losses(model, {0: sample.source}, on_meta, counts, rows=read)
        return [torch.stack(list(found.values())).sum()]

    with torch_scans(model, *targets.frozen_models):
        return measure(losses, nn.ModuleList([model, *filter(None, targets.frozen_models)])).times(factor)


def last_tokens(batch: EncodedBatch, count: int) -> EncodedBatch:
    """Cut a batch to its last tokens. Positions before them become -1."""
    columns = ("input_ids", "attention_mask", "answers")
    places = ("query", "segment_start", "segment_end", "answer_token")
    reads = ("read_query", "read_segment_end", "read_answer_token")
    begin = batch.input_ids.shape[1] - count
    cut = {name: getattr(batch, name)[:, begin:] for name in columns}
    moved = {name: getattr(batch, name) - begin for name in places + reads}
    return replace(batch, **cut, **{name: place.clamp(min=-1) for name, place in moved.items()})
