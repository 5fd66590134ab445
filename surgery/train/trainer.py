"""Train one stage of a hybrid or its control, or of the pretraining of a small base.

The documents, learning rate and random numbers of a step depend on the step's number only; with `plateau`, the learning
rate and the last step also depend on the losses before it. So a run that was killed and resumed ends with the same
weights as an uninterrupted one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.memory import release_memory, should_reduce_batch_size
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.user import StreamedDocuments, open_source
from surgery.errors import RunError
from surgery.models.held import read_masks
from surgery.models.torch_scans import torch_scans
from surgery.recipe import Train, TrainStage
from surgery.recipe.objectives import OBJECTIVES
from surgery.recipe.train import Precision
from surgery.train.checkpoints import identity_of, load_checkpoint, save_checkpoint
from surgery.train.lora import Adapters
from surgery.train.micro_batches import (
    PASS_COST,
    PASS_COST_ON_CPU,
    MicroBatch,
    StepSplit,
    log_missing_reads,
    step_counts,
)
from surgery.train.numerics import autocast, compiling, precision_of
from surgery.train.optimizer import adamw, learning_rate_factor, mark_trainable
from surgery.train.own_inputs import OwnInputs
from surgery.train.packing import packing_fault
from surgery.train.plateau import LAST_STEP, is_at_plateau, num_steps_from, stage_lengths
from surgery.train.sharded import full, gather, sharded_like, trainable_parameters, twin
from surgery.train.shared_prefix import SharedPrefix, share_weights, unshare_bases
from surgery.train.step_loader import steps_of, workers_by_default
from surgery.train.step_log import StepLog, StepLosses, diverged
from surgery.train.targets import Targets, logits_at

History = list[dict[str, float]]
OnStep = Callable[[int, History], None]
MOST_SECONDS = 300  # between two checkpoints, where steps are slow
_LOG = logging.getLogger(__name__)
_SHARDING = (DistributedType.FSDP, DistributedType.DEEPSPEED)


@dataclass
class StageTrainer:
    """Train one stage, from its newest checkpoint if there is one: call `run`. Arguments as of `train_model`, and:

    Args:
        model: trained in place. Under FSDP2 it holds the old weights until the stage ends.
        targets: base and teacher that objectives compare with. `distil` is taken from the stage.
        number: index of the stage in `section.sequence`.
        folder: folder of `step_*/`, the stage's checkpoints. None saves none.
        history: entries of the earlier stages' steps.
        layers: layers that `trainable: spliced_layers` selects in a control.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    section: Train
    seed: int
    accelerator: Accelerator
    targets: Targets
    number: int = 0
    folder: Path | None = None
    history: History = field(default_factory=list)
    on_step: OnStep | None = None
    layers: Sequence[int] = ()
    texts: Path | None = None

    # Set by `prepare`.
    streams: list[Any] = field(init=False)  # documents of every source
    adapters: Adapters | None = field(init=False, default=None)  # of LoRA, not merged
    precision: Precision = field(init=False)  # of matrix products
    student: PreTrainedModel = field(init=False)  # what is trained and saved: the model, or with FSDP2 a sharded twin
    wrapped: nn.Module = field(init=False)  # the student, wrapped by Accelerate
    optimizer: Any = field(init=False)  # wrapped by Accelerate
    identity: str = field(init=False)  # hash of the training, which its checkpoints have
    start: int = field(init=False)  # number of steps that a checkpoint has finished
    split: StepSplit = field(init=False)  # how the documents of a step are put into passes
    pass_tokens: int | None = field(init=False, default=None)  # most in a pass, with padding. Set when memory runs out

    @property
    def stage(self) -> TrainStage:
        """The stage's part of the recipe."""
        return self.section.sequence[self.number]

    def run(self) -> History:
        """Train all steps of the stage, and return the history.

        Raises:
            TrainingDiverged: loss or gradient is not finite, or the loss has grown. The last good checkpoint is kept.
            RunError: out of memory, torch.compile fails, the launch does not support the recipe, or a base is missing.
        """
        self.prepare()
        lengths = stage_lengths(self.history, self.section)
        before, num_steps = sum(lengths[: self.number]), lengths[self.number]
        log = StepLog(self.history, before, self.stage, self.model.config.vocab_size, self.folder)
        # A GPU computes a step while the host prepares the next one: its losses are read one step later.
        on_gpu = self.accelerator.device.type == "cuda"
        waits = not on_gpu or self.stage.plateau is not None
        alone = self.accelerator.num_processes == 1  # several would have to agree on the time
        began = saved = time.perf_counter()
        with closing(steps_of(self.documents, range(self.start, num_steps), self._workers(), pin=on_gpu)) as steps:
            for step, micro_batches in enumerate(steps, self.start):
                if step == num_steps:  # after a plateau
                    break
                if step == 0 and self.accelerator.is_main_process:
                    log_missing_reads(self.stage, [stream.step(0) for stream in self.streams], self.tokenizer)
                torch.manual_seed(hash((self.seed, self.number, step, self.accelerator.process_index)))  # for dropout
                factor = learning_rate_factor(step, num_steps, self.stage.optimizer)
                for group in self.optimizer.param_groups:
                    group["lr"] = group["peak_lr"] * factor
                names, values = self._gradients(micro_batches, step)
                losses = StepLosses(before + step + 1, names, values)
                due = step % self.section.save_every == 0 or (alone and began - saved > MOST_SECONDS)
                saves = self.folder is not None and step > self.start and due
                if waits or saves or step == self.start:
                    log.read()
                    log.check(losses)  # before the weights are updated
                if step == self.start and self.adapters is not None:
                    self.adapters.check_gradients()
                if saves:  # these weights have a finite loss
                    self._save(step)
                    saved = time.perf_counter()
                self.optimizer.step()
                self.optimizer.zero_grad()
                losses.seconds = time.perf_counter() - began
                log.add(losses)
                log.read(keep=0 if waits or step == self.start else 1)
                if waits and num_steps == self.stage.num_steps and is_at_plateau(log.of_stage, self.stage):
                    num_steps = num_steps_from(step + 1, self.stage)
                    self.history[-1][LAST_STEP] = before + num_steps
                if self.on_step is not None:
                    self.on_step(before + step + 1, self.history)
                began = time.perf_counter()
        log.read()
        self._finish()
        if not all(bool(p.isfinite().all()) for p in trainable_parameters(self.model)):
            raise diverged(self.folder, before + num_steps, "not finite")
        return self.history

    def prepare(self) -> None:
        """Open the sources, add adapters, freeze what does not train, wrap model and optimizer, load a checkpoint."""
        model, section, stage, accelerator = self.model, self.section, self.stage, self.accelerator
        check_launch(section, stage, self.targets, accelerator)
        for source in stage.sources:
            if source.base_text is not None and self.texts is None:
                raise RunError(source.field, None, "Pass `texts`, a file of surgery.data.base_text.write_texts.")
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            self.folder = None  # DeepSpeed steps during backward, and keeps the optimizer's state to itself
        context, vocab_size = getattr(model.config, "max_position_embeddings", None), model.config.vocab_size
        self.streams = [
            open_source(source, self.tokenizer, self.seed, 1000 * self.number + index, context, vocab_size, self.texts)
            for index, source in enumerate(stage.sources)
        ]

        # What trains, and in which dtypes.
        if stage.trainable == "lora":
            torch.manual_seed(hash((self.seed, self.number)))  # the same adapters on every process and in every run
            self.adapters = Adapters(model, stage.lora, self.targets.grafts)
        unshare_bases(model)  # weights that an earlier stage shared may be trained in this one
        trained = mark_trainable(model, stage, self.layers)
        self.precision = precision_of(section, model)
        for parameter in trained:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        if section.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for frozen in self.targets.frozen_models:
            if frozen is not None:
                frozen.eval().requires_grad_(False).to(accelerator.device)

        # The model and the optimizer, as Accelerate runs them.
        self.student = model
        if accelerator.is_fsdp2:
            self.student = twin(model, accelerator)
            if self.adapters is not None:
                self.adapters.model = self.student
        if section.compile:
            self.student.compile()
        optimizer = adamw(self.student, trainable_parameters(self.student), stage.optimizer)
        self.wrapped, self.optimizer = accelerator.prepare(self.student, optimizer)
        self.wrapped.train()

        # What earlier steps have left.
        self.identity = identity_of(model, section, self.number, self.seed, self.targets.grafts)
        self.start, self.history = 0, list(self.history)
        if self.folder is not None:
            state = load_checkpoint(self.folder, self.student, self.optimizer, self.identity, accelerator)
            if state is not None:
                self.start, self.history = int(state["step"]), state["history"]
            elif self.number:  # keep the result of the earlier stages
                self._save(0)

        # What the model shares with the frozen base, and how documents are put into passes.
        prefix = None
        if self.targets.base is not None and not accelerator.is_fsdp2:
            share_weights(model, self.targets.base)  # not before a checkpoint has been read into the model's weights
            prefix = SharedPrefix.of(model, self.targets.base) if not section.compile else None
        own_inputs, self.masks = None, list[tuple[Tensor, Tensor]]()
        if stage.trainable == "reads":
            own_inputs = OwnInputs(self.student, accelerator.is_fsdp2)
            in_part, weights = read_masks(model), dict(self.student.named_parameters())
            if in_part and accelerator.distributed_type == DistributedType.DEEPSPEED:
                hint = "DeepSpeed hides the gradients, a part of which must be 0. Launch with ddp.yaml or fsdp2.yaml."
                raise RunError("train.trainable", "reads", hint)
            names = {name: in_part[weight] for name, weight in model.named_parameters() if weight in in_part}
            self.masks = [(weights[name], sharded_like(mask, weights[name])) for name, mask in names.items()]
        self.targets = replace(self.targets, distil=stage.distil, prefix=prefix, own_inputs=own_inputs)
        self.split = StepSplit(
            stage.sources,
            accelerator.process_index,
            accelerator.num_processes,
            section.micro_batch,
            self._packs(),
            accelerator.is_fsdp2,
            PASS_COST_ON_CPU if accelerator.device.type == "cpu" else PASS_COST,
        )

    def documents(self, step: int) -> list[MicroBatch]:
        """Prepare the micro-batches of a step on the CPU, in a worker process if there are some."""
        return self.split([stream.step(step) for stream in self.streams], self.tokenizer)

    def _workers(self) -> int:
        """Number of processes that prepare steps. Streamed data have one at most: each would read all rows."""
        workers = self.section.workers
        if workers is None:
            workers = workers_by_default(self.accelerator.device, self.accelerator.num_processes)
        return min(workers, 1) if any(isinstance(stream, StreamedDocuments) for stream in self.streams) else workers

    def _packs(self) -> bool:
        """True if documents share rows: it is wanted, and all models keep the documents of a row separate."""
        on_gpu = self.accelerator.device.type == "cuda"
        if not (on_gpu if self.section.packing is None else self.section.packing):
            return False
        models = {"the model": self.wrapped}
        if self.targets.base is not None and "base.logits" in self.stage.needs:
            models["the frozen base"] = self.targets.base
        if self.targets.teacher is not None:
            models["the teacher"] = self.targets.teacher.model
        with autocast(self.precision, self.accelerator):  # trained weights are fp32, frozen ones may be bf16
            fault = "not supported with torch.compile" if self.section.compile else packing_fault(models)
        if fault is not None and self.accelerator.is_main_process:
            _LOG.warning("train.packing: every document of %s has its own padded row (%s)", self.stage.name, fault)
        return fault is None

    def _gradients(self, micro_batches: Sequence[MicroBatch], step: int) -> tuple[list[str], Tensor]:
        """Accumulate the gradients of a step, and clip them. Splits the passes after an out-of-memory error.

        Returns:
            Names of the weighted losses. On the device the losses, the number of tokens and the norm of the gradient,
            all of them over all processes.
        """
        sources, accelerator, model = self.stage.sources, self.accelerator, self.wrapped
        progress = step / max(1, self.stage.num_steps - 1)
        counts = step_counts(sources, micro_batches, bool(self.targets.grafts), accelerator)
        with torch_scans(self.model, *self.targets.frozen_models):
            while (sums := self._run_passes(micro_batches, counts, progress, step)) is None:
                self.optimizer.zero_grad()
                release_memory()
        weighted = dict.fromkeys(name for source in sources for name in source.weights.at(progress))
        # The same on all processes, some of which may have no documents of a source.
        names = sorted(objective.name for objective in self.targets.objectives(weighted))
        zero = torch.zeros((), device=accelerator.device)
        tokens = sum(float(part.batch.attention_mask.sum()) for part in micro_batches if part.real)
        tokens_of_all = torch.full((), tokens * accelerator.num_processes, device=accelerator.device)
        found = torch.stack([*(sums.get(name, zero).float() for name in names), tokens_of_all])
        means = accelerator.reduce(found, "mean")
        for weight, mask in self.masks:
            if weight.grad is not None:
                weight.grad *= mask
        norm = accelerator.clip_grad_norm_(trainable_parameters(model), self.stage.optimizer.max_grad_norm)
        return names, torch.cat([means, full(torch.as_tensor(norm)).detach().reshape(1).to(means)])

    def _run_passes(
        self, micro_batches: Sequence[MicroBatch], counts: dict[tuple[int, str], float], progress: float, step: int
    ) -> dict[str, Tensor] | None:
        """Run forward and backward of all micro-batches. Return the sums of the losses; None if memory ran out."""
        accelerator, model = self.accelerator, self.wrapped
        parts = [part for whole in micro_batches for part in whole.within(self.pass_tokens)]
        sums: dict[str, Tensor] = {}
        for place, part in enumerate(parts):
            accelerator.sync_gradients = last = place + 1 == len(parts)  # DeepSpeed steps where this is set
            sources = {index: self.stage.sources[index] for index in part.sources}
            try:
                with (
                    compiling() if self.section.compile else nullcontext(),
                    nullcontext() if last else accelerator.no_sync(model),
                ):
                    with autocast(self.precision, accelerator):
                        rows = None if self.section.compile else self.targets.logit_rows(sources, part.batch)
                        if rows is not None and accelerator.device.type == "cuda":
                            rows = rows.pin_memory().to(accelerator.device, non_blocking=True)
                        batch = part.batch.to(accelerator.device)
                        with logits_at(model, rows):
                            losses = self.targets.weighted_losses(model, sources, batch, counts, progress, rows)
                        total = torch.stack(list(losses.values())).sum() * float(part.real)
                    accelerator.backward(total)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                if not should_reduce_batch_size(error):
                    raise
                self._lower_pass_tokens(part, step)
                return None
            for name, loss in losses.items():
                sums[name] = sums.get(name, 0.0) + loss.detach() * float(part.real)
        return sums

    def _lower_pass_tokens(self, part: MicroBatch, step: int) -> None:
        """Halve the pass that did not fit in memory, unless it has one row or there are several processes."""
        rows, width = part.batch.input_ids.shape
        field = self.stage.sources[part.sources[0]].field if len(part.sources) == 1 else "train.sources"
        if self.accelerator.num_processes > 1:
            hint = "Out of memory. With several processes the size cannot be lowered automatically. "
            hint += "Lower train.micro_batch."
            raise RunError(field, f"{rows} x {width} tokens in a micro-batch", hint)
        if rows == 1:
            hint = "Out of memory with one document. Shorten it, or set train.gradient_checkpointing."
            raise RunError(field, f"{width} tokens", hint)
        self.pass_tokens = rows // 2 * width
        text = "step %d: out of memory; %s continues with %d tokens in a micro-batch"
        _LOG.warning(text, step + 1, field, self.pass_tokens)

    def _save(self, step: int) -> None:
        assert self.folder is not None
        state = {"of": self.identity, "history": self.history}
        save_checkpoint(self.folder, self.student, self.optimizer, step, state, self.accelerator)

    def _finish(self) -> None:
        """Put trained weights into the model, and undo what the stage has set."""
        if self.student is not self.model:
            gather(self.student, self.model)
            if self.adapters is not None:
                self.adapters.model = self.model
        self.wrapped, self.optimizer = self.accelerator.free_memory(self.wrapped, self.optimizer)
        self.model.eval()
        if self.targets.cache is not None:
            self.targets.cache.flush()
        if self.section.gradient_checkpointing:
            self.model.gradient_checkpointing_disable()


def check_launch(section: Train, stage: TrainStage, targets: Targets, accelerator: Accelerator) -> None:
    """Raise RunError if the launch does not support the recipe, or a base is missing."""
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise RunError("fsdp_version", 1, "Set fsdp_version: 2, as recipes/accelerate/fsdp2.yaml does.")
    if accelerator.is_fsdp2 and section.check_every is not None:
        hint = "One process cannot evaluate alone while weights are sharded. Remove it."
        raise RunError("train.check_every", section.check_every, hint)
    if stage.lora.quantization is not None and accelerator.distributed_type in _SHARDING:
        hint = "Weights of 4 bits are not sharded. Launch with recipes/accelerate/ddp.yaml, or set it to null."
        raise RunError("train.lora.quantization", stage.lora.quantization, hint)
    for source in stage.sources:
        for name in source.weights.at(0.5):
            if "base.logits" in OBJECTIVES[name].needs and targets.base is None:
                raise RunError(f"{source.field}.weights", name, "It compares with the frozen base. Pass `base`.")
