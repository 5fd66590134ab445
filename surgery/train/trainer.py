"""Training loop of one stage, for hybrids, their controls, and the pretraining of small bases.

The documents, learning rate and random numbers of a step depend on the step's number only; with `plateau`, the learning
rate and the last step also depend on the losses before it. So a run that was killed and resumed ends with the same
weights as an uninterrupted one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.memory import release_memory, should_reduce_batch_size
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.models.torch_scans import torch_scans
from surgery.recipe import Train, TrainStage
from surgery.train.checkpoints import save_checkpoint
from surgery.train.compiling import compiling
from surgery.train.growth import diverged
from surgery.train.lora import Adapters
from surgery.train.micro_batches import MicroBatch, step_counts
from surgery.train.optimizer import set_learning_rates
from surgery.train.plateau import LAST_STEP, is_at_plateau, num_steps_from, stage_lengths
from surgery.train.precision import autocast
from surgery.train.preparing import PreparedStage, log_missing_reads, prepare_stage
from surgery.train.sharded import full, gather, trainable_parameters
from surgery.train.step_loader import steps_of
from surgery.train.step_losses import StepLog, StepLosses
from surgery.train.targets import Targets, logits_at

History = list[dict[str, float]]
OnStep = Callable[[int, History], None]


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
    log = StepLog(entries, before, stage, model.config.vocab_size, folder)
    # A GPU computes a step while the host prepares the next one: its losses are read one step later.
    on_gpu = accelerator.device.type == "cuda"
    waits = not on_gpu or stage.plateau is not None
    began = time.perf_counter()
    with closing(steps_of(prepared.make, range(start, num_steps), prepared.workers, pin=on_gpu)) as steps:
        for step, micro_batches in enumerate(steps, start):
            if step == num_steps:  # after a plateau
                break
            if step == 0 and accelerator.is_main_process:
                log_missing_reads(stage, [stream.step(0) for stream in prepared.make.streams], tokenizer)
            torch.manual_seed(hash((seed, number, step, accelerator.process_index)))  # for dropout
            set_learning_rates(optimizer, stage.optimizer, step, num_steps)
            with torch_scans(model, *targets.frozen_models):
                names, means = accumulate_gradients(prepared, micro_batches, section, accelerator, step)
            norm = accelerator.clip_grad_norm_(trainable_parameters(prepared.wrapped), stage.optimizer.max_grad_norm)
            losses = StepLosses(before + step + 1, names, means[:-1], means[-1], full(torch.as_tensor(norm)))
            saves = folder is not None and step > start and step % section.save_every == 0
            if waits or saves or step == start:
                log.read()
                log.check(losses)  # before the weights are updated
            if step == start and adapters is not None:
                adapters.check_gradients()
            if folder is not None and saves:  # these weights have a finite loss
                state = {"of": prepared.identity, "history": entries}
                save_checkpoint(folder, student, optimizer, step, state, accelerator)
            optimizer.step()
            optimizer.zero_grad()
            losses.seconds = time.perf_counter() - began
            log.add(losses)
            log.read(keep=0 if waits or step == start else 1)
            if waits and num_steps == stage.num_steps and is_at_plateau(log.of_stage, stage):
                num_steps = num_steps_from(step + 1, stage)
                entries[-1][LAST_STEP] = before + num_steps
            if on_step is not None:
                on_step(before + step + 1, entries)
            began = time.perf_counter()
    log.read()
    _finish(prepared, model, section, accelerator)
    if not all(bool(p.isfinite().all()) for p in trainable_parameters(model)):
        raise diverged(folder, before + num_steps, "not finite")
    return StageResult(entries, adapters, prepared.packing)


def _finish(prepared: PreparedStage, model: PreTrainedModel, section: Train, accelerator: Accelerator) -> None:
    """Put trained weights into the model, and undo what the stage has set."""
    if prepared.student is not model:
        gather(prepared.student, model)
        if prepared.adapters is not None:
            prepared.adapters.model = model
    accelerator.free_memory()
    model.eval()
    if prepared.targets.cache is not None:
        prepared.targets.cache.flush()
    if section.gradient_checkpointing:
        model.gradient_checkpointing_disable()


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


def _reduced(
    sums: dict[str, Tensor], stage: TrainStage, parts: Sequence[MicroBatch], progress: float, accelerator: Accelerator
) -> tuple[list[str], Tensor]:
    """Losses and tokens of all processes."""
    names = sorted({name for source in stage.sources for name in source.weights.at(progress)} & set(sums))
    tokens = sum(float(part.batch.attention_mask.sum()) for part in parts if part.real) * accelerator.num_processes
    values = [*(sums[name].float() for name in names), torch.full((), tokens, device=accelerator.device)]
    return names, accelerator.reduce(torch.stack(values), "mean")
