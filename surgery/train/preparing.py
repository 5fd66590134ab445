"""Prepare a stage of training: sources, adapters, frozen weights, optimizer, packing and checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.encoding import encode
from surgery.data.generated import Stream
from surgery.data.user import StreamedDocuments, open_source
from surgery.errors import RunError
from surgery.probes.documents import Document
from surgery.recipe import Train, TrainStage
from surgery.recipe.objectives import OBJECTIVES
from surgery.recipe.train import Precision
from surgery.train.lora import Adapters
from surgery.train.micro_batches import (
    PASS_COST,
    PASS_COST_ON_CPU,
    PassBudget,
    StepMaker,
    StepSplit,
)
from surgery.train.optimizer import adamw, mark_trainable
from surgery.train.packing import packing_fault
from surgery.train.precision import precision_of
from surgery.train.resuming import identity_of, resume
from surgery.train.sharded import trainable_parameters, twin
from surgery.train.shared_prefix import SharedPrefix, share_weights, unshare_bases
from surgery.train.step_loader import workers_by_default
from surgery.train.targets import Targets

History = list[dict[str, float]]
_LOG = logging.getLogger(__name__)
_SHARDING = (DistributedType.FSDP, DistributedType.DEEPSPEED)


@dataclass(frozen=True)
class PreparedStage:
    """A stage that is ready to train. Only `budget` changes during the stage.

    Attributes:
        stage: its part of the recipe.
        targets: base, teacher and settings that objectives compare with.
        student: the model that is trained and saved. With FSDP2 it is a sharded twin.
        wrapped: the student, wrapped by Accelerate.
        optimizer: wrapped by Accelerate.
        make: prepares the micro-batches of a step.
        workers: number of processes that prepare the next steps.
        adapters: LoRA adapters.
        budget: tokens in a pass. Lowered after an out-of-memory error.
        packing: True if documents share rows.
        precision: of matrix products: the recipe's, and always `bf16` for a model in half precision.
        identity: hash of the training, which its checkpoints have.
        start: number of steps that a checkpoint has finished.
        entries: those of all finished steps, earlier stages included.
    """

    stage: TrainStage
    targets: Targets
    student: PreTrainedModel
    wrapped: nn.Module
    optimizer: Any
    make: StepMaker
    workers: int
    adapters: Adapters | None
    budget: PassBudget
    packing: bool
    precision: Precision
    identity: str
    start: int
    entries: History


def prepare_stage(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    section: Train,
    seed: int,
    accelerator: Accelerator,
    targets: Targets,
    number: int = 0,
    layers: Sequence[int] = (),
    folder: Path | None = None,
    history: Sequence[dict[str, float]] = (),
) -> PreparedStage:
    """Open the sources, add adapters, freeze what does not train, wrap model and optimizer, and load a checkpoint.

    Args:
        model: changed in place. The other arguments are those of `train_stage`.

    Raises:
        RunError: the launch does not support the recipe, or a base or teacher is missing.
    """
    stage = section.sequence[number]
    check_stage(section, stage, targets, accelerator)
    context, vocab_size = getattr(model.config, "max_position_embeddings", None), model.config.vocab_size
    streams = [
        open_source(source, tokenizer, seed, 1000 * number + index, context, vocab_size)
        for index, source in enumerate(stage.sources)
    ]
    adapters = None
    if stage.trainable == "lora":
        torch.manual_seed(hash((seed, number)))  # the same adapters on every process and in every run
        adapters = Adapters(model, stage.lora, targets.grafts)
    unshare_bases(model)  # weights that an earlier stage shared may be trained in this one
    trained = mark_trainable(model, stage, layers)
    precision = precision_of(section, model)
    for parameter in trained:
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    if section.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for frozen in (targets.base, targets.teacher.model if targets.teacher else None):
        if frozen is not None:
            frozen.eval().requires_grad_(False).to(accelerator.device)
    student, prefix = model, None
    if accelerator.is_fsdp2:
        student = twin(model, accelerator)
        if adapters is not None:
            adapters.model = student
    if section.compile:
        student.compile()
    wrapped, optimizer = accelerator.prepare(student, adamw(student, trainable_parameters(student), stage.optimizer))
    wrapped.train()
    identity = identity_of(model, section, number, seed, targets.grafts)
    start, entries = resume(folder, student, optimizer, identity, accelerator, number, list(history))
    if targets.base is not None and not accelerator.is_fsdp2:
        share_weights(model, targets.base)  # not before a checkpoint has been read into the model's weights
        prefix = SharedPrefix.of(model, targets.base) if not section.compile else None
    targets = replace(targets, distil=stage.distil, prefix=prefix)
    packing = packs(wrapped, section, stage, targets, accelerator)
    split = StepSplit(
        stage.sources,
        accelerator.process_index,
        accelerator.num_processes,
        section.micro_batch,
        packing,
        accelerator.is_fsdp2,
        PASS_COST_ON_CPU if accelerator.device.type == "cpu" else PASS_COST,
    )
    return PreparedStage(
        stage=stage,
        targets=targets,
        student=student,
        wrapped=wrapped,
        optimizer=optimizer,
        make=StepMaker(streams, split, tokenizer),
        workers=workers_of(section, streams, accelerator),
        adapters=adapters,
        budget=PassBudget(),
        packing=packing,
        precision=precision,
        identity=identity,
        start=start,
        entries=entries,
    )


def workers_of(section: Train, streams: Sequence[Stream], accelerator: Accelerator) -> int:
    """Number of processes that prepare steps. Streamed data have one at most: each would read all rows."""
    workers = section.workers
    if workers is None:
        workers = workers_by_default(accelerator.device, accelerator.num_processes)
    return min(workers, 1) if any(isinstance(stream, StreamedDocuments) for stream in streams) else workers


def check_stage(section: Train, stage: TrainStage, targets: Targets, accelerator: Accelerator) -> None:
    """Raise RunError if the launch does not support the recipe, or a base or teacher is missing."""
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise RunError("fsdp_version", 1, "Set fsdp_version: 2, as recipes/accelerate/fsdp2.yaml does.")
    if accelerator.is_fsdp2 and section.check_every is not None:
        hint = "One process cannot evaluate alone while weights are sharded. Remove it."
        raise RunError("train.check_every", section.check_every, hint)
    if stage.lora.quantization is not None and accelerator.distributed_type in _SHARDING:
        hint = "Weights of 4 bits are not sharded. Launch with recipes/accelerate/ddp.yaml, or set it to null."
        raise RunError("train.lora.quantization", stage.lora.quantization, hint)
    for index, source in enumerate(stage.sources):
        if source.rows is not None and source.rows < accelerator.num_processes:
            hint = f"Set at least one row for each of the {accelerator.num_processes} processes."
            raise RunError(f"train.sources.{index}.rows", source.rows, hint)
        for name in source.weights.at(0.5):
            field = f"train.sources.{index}.weights.{name}"
            if "base.logits" in OBJECTIVES[name].needs and targets.base is None:
                raise RunError(field, 1.0, "It compares with the frozen base. Pass `base`.")
            if OBJECTIVES[name].needs_teacher and targets.teacher is None:
                raise RunError("train.teacher", None, f"{name} compares with a teacher. Set train.teacher.")


def packs(model: nn.Module, section: Train, stage: TrainStage, targets: Targets, accelerator: Accelerator) -> bool:
    """True if documents share rows: it is wanted, and all models of the stage keep the documents of a row separate.

    Logs why they do not.
    """
    if not (accelerator.device.type == "cuda" if section.packing is None else section.packing):
        return False
    models = {"the model": model}
    if targets.base is not None and "base.logits" in stage.needs:
        models["the frozen base"] = targets.base
    if targets.teacher is not None:
        models["the teacher"] = targets.teacher.model
    fault = "not supported with torch.compile" if section.compile else packing_fault(models)
    if fault is not None and accelerator.is_main_process:
        _LOG.warning("train.packing: every document of %s has its own padded row (%s)", stage.name, fault)
    return fault is None


def log_missing_reads(
    stage: TrainStage, documents: Sequence[Sequence[Document]], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Log how many answer tokens of a step have no gold position, for the sources that need them."""
    for index, (source, drawn) in enumerate(zip(stage.sources, documents, strict=True)):
        marked = [d for d in drawn if d.questions and all(q.segment and q.value for q in d.questions)]
        if not marked or not source.weights.needs("gold_positions"):
            continue
        batch = encode(marked, tokenizer)
        reads = batch.read_query >= 0
        missing = int((reads & (batch.read_answer_token < 0)).sum())
        if missing:
            text = "train.sources.%d: no token of the segment holds %d of %d answer tokens of the first step. %s"
            _LOG.warning(text, index, missing, int(reads.sum()), "Attention is not supervised there.")
