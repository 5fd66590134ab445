"""Training loop of one stage, for hybrids, their controls, and the pretraining of small bases.

The documents, learning rate and random numbers of a step depend on the step's number only; with `plateau`, the learning
rate and the last step also depend on the losses before it. So a run that was killed and resumed ends with the same
weights as an uninterrupted one.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.memory import release_memory, should_reduce_batch_size
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.encoding import encode
from surgery.data.user import open_source
from surgery.errors import RunError
from surgery.models.torch_scans import torch_scans
from surgery.probes.documents import Document
from surgery.recipe import Train, TrainStage
from surgery.recipe.objectives import OBJECTIVES
from surgery.recipe.train import Precision
from surgery.train.checkpoints import save_checkpoint
from surgery.train.compiling import compiling
from surgery.train.growth import diverged, growing_loss
from surgery.train.lora import Adapters
from surgery.train.micro_batches import (
    PASS_COST,
    PASS_COST_ON_CPU,
    MicroBatch,
    PassBudget,
    StepMaker,
    StepSplit,
    step_counts,
)
from surgery.train.optimizer import adamw, mark_trainable, set_learning_rates
from surgery.train.packing import packing_fault
from surgery.train.plateau import LAST_STEP, is_at_plateau, num_steps_from, stage_lengths
from surgery.train.precision import autocast, precision_of
from surgery.train.resuming import identities_of, resume
from surgery.train.sharded import full, gather, trainable_parameters, twin
from surgery.train.shared_prefix import SharedPrefix, share_weights, unshare_bases
from surgery.train.step_losses import StepLosses
from surgery.train.targets import Targets, logits_at

History = list[dict[str, float]]
OnStep = Callable[[int, History], None]
_LOG = logging.getLogger(__name__)
_SHARDING = (DistributedType.FSDP, DistributedType.DEEPSPEED)


@dataclass(frozen=True)
class StageResult:
    """Results of a stage, in addition to the model's weights.

    Attributes:
        history: entries of all steps so far: losses, tokens, seconds.
        adapters: LoRA adapters, not merged yet.
        packing: True if documents shared rows.
    """

    history: History
    adapters: Adapters | None = None
    packing: bool = False


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
    adapters: Adapters | None
    budget: PassBudget
    packing: bool
    precision: Precision
    identity: str
    start: int
    entries: History


def train_stage(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    section: Train,
    seed: int,
    accelerator: Accelerator,
    targets: Targets,
    number: int = 0,
    folder: Path | None = None,
    history: Sequence[dict[str, float]] = (),
    on_step: OnStep | None = None,
    layers: Sequence[int] = (),
) -> StageResult:
    """Train one stage, from its newest checkpoint if there is one.

    Args:
        model: trained in place. Under FSDP2 it holds the old weights until the stage ends.
        tokenizer: the model's.
        section: the recipe's section `train`.
        seed: of documents, adapters and dropout.
        accelerator: of this process.
        targets: base and teacher that objectives compare with. `distil` is taken from the stage.
        number: index of the stage in `section.sequence`.
        folder: folder of `step_*/`, the checkpoints to resume from; the two newest are kept. None saves no checkpoints.
        history: entries of the earlier stages.
        on_step: called on every process after each step with its number and the history. On a GPU, the history may end
            with the entry of the step before, since the losses of this one are still being computed.
        layers: layers that `trainable: spliced_layers` selects in a control.

    Raises:
        TrainingDiverged: loss or gradient is not finite, or the loss has grown. The last good checkpoint is kept.
        RunError: one document does not fit in memory, torch.compile fails, or the launch does not support the recipe.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        folder = None  # DeepSpeed steps during backward, and keeps the optimizer's state to itself
    prepared = prepare_stage(model, tokenizer, section, seed, accelerator, targets, number, layers, folder, history)
    stage, student, optimizer, adapters = prepared.stage, prepared.student, prepared.optimizer, prepared.adapters
    start, entries = prepared.start, prepared.entries
    lengths = stage_lengths(entries, section)
    before, num_steps = sum(lengths[:number]), lengths[number]
    pending: deque[StepLosses] = deque()

    def read_losses(keep: int = 0) -> None:
        """Append the entries of all but the last `keep` steps. Raises TrainingDiverged."""
        while len(pending) > keep:
            done = pending.popleft()
            check(done)
            entries.append(done.entry())
            of_stage = [entry for entry in entries if entry["step"] > before]
            if (growing := growing_loss(of_stage, stage, model.config.vocab_size)) is not None:
                raise diverged(folder, done.step, growing)

    def check(losses: StepLosses) -> None:
        if not losses.is_finite:
            raise diverged(folder, losses.step, str(losses.losses["loss"]))

    # A GPU computes a step while the host prepares the next one: its losses are read one step later.
    waits = accelerator.device.type != "cuda" or stage.plateau is not None
    began = time.perf_counter()
    for step in range(start, num_steps):
        if step == num_steps:  # after a plateau
            break
        micro_batches = prepared.make(step)
        if step == 0 and accelerator.is_main_process:
            _log_missing_reads(stage, [stream.step(0) for stream in prepared.make.streams], tokenizer)
        torch.manual_seed(hash((seed, number, step, accelerator.process_index)))  # for dropout
        set_learning_rates(optimizer, stage.optimizer, step, num_steps)
        with torch_scans(model, *targets.frozen_models):
            names, means = accumulate_gradients(prepared, micro_batches, section, accelerator, step)
        norm = accelerator.clip_grad_norm_(trainable_parameters(prepared.wrapped), stage.optimizer.max_grad_norm)
        losses = StepLosses(before + step + 1, names, means[:-1], means[-1], full(torch.as_tensor(norm)))
        saves = folder is not None and step > start and step % section.save_every == 0
        if waits or saves or step == start:
            read_losses()
            check(losses)  # before the weights are updated
        if step == start and adapters is not None:
            adapters.check_gradients()
        if folder is not None and saves:  # these weights have a finite loss
            state = {"of": prepared.identity, "history": entries}
            save_checkpoint(folder, student, optimizer, step, state, accelerator)
        optimizer.step()
        optimizer.zero_grad()
        losses.seconds = time.perf_counter() - began
        pending.append(losses)
        read_losses(keep=0 if waits or step == start else 1)
        if waits and num_steps == stage.num_steps and is_at_plateau(entries[-step - 1 :], stage):
            num_steps = num_steps_from(step + 1, stage)
            entries[-1][LAST_STEP] = before + num_steps
        if on_step is not None:
            on_step(before + step + 1, entries)
        began = time.perf_counter()
    read_losses()
    if student is not model:
        gather(student, model)
        if adapters is not None:
            adapters.model = model
    if not all(bool(p.isfinite().all()) for p in trainable_parameters(model)):
        raise diverged(folder, before + num_steps, "not finite")
    accelerator.free_memory()
    model.eval()
    if targets.cache is not None:
        targets.cache.flush()
    if section.gradient_checkpointing:
        model.gradient_checkpointing_disable()
    return StageResult(entries, adapters, prepared.packing)


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
    identities = identities_of(model, section, number, seed, targets.grafts)
    start, entries = resume(folder, student, optimizer, identities, accelerator, number, list(history))
    if targets.base is not None and not accelerator.is_fsdp2:
        share_weights(model, targets.base)  # not before a checkpoint has been read into the model's weights
        prefix = SharedPrefix.of(model, targets.base) if not section.compile else None
    targets = replace(targets, distil=stage.distil, prefix=prefix)
    packing = section.packing if section.packing is not None else accelerator.device.type == "cuda"
    packing = packing and supports_packing(wrapped, section, stage, targets, accelerator)
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
        adapters=adapters,
        budget=PassBudget(),
        packing=packing,
        precision=precision,
        identity=identities[0],
        start=start,
        entries=entries,
    )


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


def accumulate_gradients(
    prepared: PreparedStage,
    micro_batches: Sequence[MicroBatch],
    section: Train,
    accelerator: Accelerator,
    step: int,
) -> tuple[list[str], Tensor]:
    """Run forward and backward of all micro-batches of a step. Halves micro-batches after an out-of-memory error.

    Returns:
        Names of the weighted losses, and on the device the losses and, last, the number of tokens. Both cover all
        processes.

    Raises:
        RunError: out of memory with one document, or on several processes.
    """
    stage, targets = prepared.stage, prepared.targets
    progress = step / max(1, stage.num_steps - 1)
    counts = step_counts(stage.sources, micro_batches, bool(targets.grafts), accelerator)
    while True:
        parts = [part for whole in micro_batches for part in whole.within(prepared.budget.tokens)]
        sums: dict[str, Tensor] = {}
        for place, part in enumerate(parts):
            accelerator.sync_gradients = last = place + 1 == len(parts)  # DeepSpeed steps where this is set
            sources = {index: stage.sources[index] for index in part.sources}
            try:
                with (
                    compiling() if section.compile else nullcontext(),
                    nullcontext() if last else accelerator.no_sync(prepared.wrapped),
                ):
                    with autocast(prepared.precision, accelerator):
                        rows = None if section.compile else targets.logit_rows(sources, part.batch)
                        if rows is not None and accelerator.device.type == "cuda":
                            rows = rows.pin_memory().to(accelerator.device, non_blocking=True)
                        batch = part.batch.to(accelerator.device)
                        with logits_at(prepared.wrapped, rows):
                            losses = targets.weighted_losses(prepared.wrapped, sources, batch, counts, progress, rows)
                        total = torch.stack(list(losses.values())).sum() * float(part.real)
                    accelerator.backward(total)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                if not should_reduce_batch_size(error):
                    raise
                break
            for name, loss in losses.items():
                sums[name] = sums.get(name, 0.0) + loss.detach() * float(part.real)
        else:
            return _reduced(sums, stage, micro_batches, progress, accelerator)
        losses, total = {}, None  # their graph holds memory
        prepared.budget.lower(part, step, accelerator)
        prepared.optimizer.zero_grad()
        release_memory()


def _log_missing_reads(
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


def _reduced(
    sums: dict[str, Tensor], stage: TrainStage, parts: Sequence[MicroBatch], progress: float, accelerator: Accelerator
) -> tuple[list[str], Tensor]:
    """Losses and tokens of all processes."""
    names = sorted({name for source in stage.sources for name in source.weights.at(progress)} & set(sums))
    tokens = sum(float(part.batch.attention_mask.sum()) for part in parts if part.real) * accelerator.num_processes
    values = [*(sums[name].float() for name in names), torch.tensor(tokens).to(accelerator.device)]
    return names, accelerator.reduce(torch.stack(values), "mean")


def supports_packing(
    model: nn.Module,
    section: Train,
    stage: TrainStage,
    targets: Targets,
    accelerator: Accelerator,
) -> bool:
    """True if all models of the stage keep the documents of a row separate. Otherwise logs why, if packing is set."""
    models = {"the model": model}
    if targets.base is not None and "base.logits" in stage.needs:
        models["the frozen base"] = targets.base
    if targets.teacher is not None:
        models["the teacher"] = targets.teacher.model
    fault = "not supported with torch.compile" if section.compile else packing_fault(models)
    if fault is not None and section.packing and accelerator.is_main_process:
        _LOG.warning("train.packing: every document of %s has its own padded row (%s)", stage.name, fault)
    return fault is None
