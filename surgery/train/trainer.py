"""The training loop. Owns: the steps of one stage, lack of memory, the guard against losses that are no numbers.

Must never know: recipes of other stages, how heads are located. One loop pretrains the small base, trains the hybrid
and trains its control. A step's data, learning rate and random numbers depend on the step alone, so a run that was
killed and goes on ends with the same weights as one that was not.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.memory import release_memory, should_reduce_batch_size
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.encoding import EncodedBatch
from surgery.data.generated import Stream
from surgery.data.user import open_source
from surgery.errors import RunError, TrainingDiverged
from surgery.files.atomic import fingerprint
from surgery.recipe import Source, Train, TrainStage
from surgery.recipe.train import FROM_TEACHER
from surgery.train.checkpoints import checkpoints, load_step, save_step
from surgery.train.compiling import compiling
from surgery.train.growth import grown
from surgery.train.logits_cache import LogitsCache
from surgery.train.lora import Adapters
from surgery.train.micro_batches import MicroBatch, counted, cut
from surgery.train.objectives import Terms
from surgery.train.optimizer import adamw, set_learning_rates, trainable
from surgery.train.packing import why_not
from surgery.train.sharded import gather, trains, twin
from surgery.train.shared_prefix import SharedPrefix, share_weights
from surgery.train.teacher import Teacher
from surgery.types import Graft

OnStep = Callable[[int, dict[str, float]], None]
_LOG = logging.getLogger(__name__)


@dataclass
class Trainer:
    """One stage of a training: a model, what it is trained on, and where its checkpoints go.

    Attributes:
        model: trained in place. Under FSDP2 it holds the weights from before until `run` returns.
        base: the frozen model that `keep` compares with; needed when a source gives `keep` a weight.
        grafts: the spliced heads, which `attention` supervises; none for a control or a pretraining.
        folder: holds `step_*/`, the checkpoints to resume from; the two newest are kept. None keeps none.
        on_step: called on every process after each step with its entry of the history: losses, tokens, seconds.
        number: of the stage in `section.sequence`.
        teacher: what `distil`, `mixing` and `hidden` compare with.
        cache: of the teacher's logits.
        layers: that `trains: spliced_layers` means for a control.
        history: of every step so far, those of earlier stages first.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    section: Train
    seed: int
    folder: Path | None
    accelerator: Accelerator
    base: PreTrainedModel | None = None
    grafts: tuple[Graft, ...] = ()
    on_step: OnStep | None = None
    number: int = 0
    teacher: Teacher | None = None
    cache: LogitsCache | None = None
    layers: tuple[int, ...] = ()
    history: list[dict[str, float]] = field(default_factory=list)
    adapters: Adapters | None = None

    def __post_init__(self) -> None:
        self.stage: TrainStage = self.section.sequence[self.number]
        self._streams: list[Stream] = []
        self._before = sum(stage.num_steps for stage in self.section.sequence[: self.number])
        self.trained = self.model  # what is stepped: under FSDP2 a sharded twin, until `run` returns
        self.prefix: SharedPrefix | None = None
        self.packed = False  # whether documents share rows, once it is known
        self._running: MicroBatch | None = None
        self._at_once: dict[int, int] = {}  # documents of a source in a micro-batch, where memory forced them down
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            self.folder = None  # it steps inside of backward, and keeps the optimizer's state to itself

    def run(self) -> list[dict[str, float]]:
        """Trains to the last step, from the newest checkpoint if there is one; returns the losses of every step.

        Raises:
            TrainingDiverged: loss or gradient is not finite, or far above where it was; the last good step stays.
            RunError: one document does not fit in memory, torch.compile fails, or what `_check` refuses.
        """
        self._check()
        self._streams = self._open()
        self._prepare_model()
        optimizer = adamw(self.trained, trains(self.trained), self.stage.optimizer)
        model, optimizer = self.accelerator.prepare(self.trained, optimizer)
        parameters = trains(model)
        model.train()
        self.packed = self.section.packing and self._packs(model)
        start = self._resume(optimizer)
        for step in range(start, self.stage.num_steps):
            self._one_step(model, optimizer, parameters, step, start)
        self._make_whole()
        if not all(bool(p.isfinite().all()) for p in trains(self.model)):
            raise self._diverged(self.stage.num_steps - 1, "not finite")
        self.accelerator.free_memory()
        self.model.eval()
        if self.cache is not None:
            self.cache.flush()
        if self.section.gradient_checkpointing:
            self.model.gradient_checkpointing_disable()
        return self.history

    def _open(self) -> list[Stream]:
        """The documents of every source; those of later stages are others."""
        context = getattr(self.model.config, "max_position_embeddings", None)
        first = 1000 * self.number
        return [
            open_source(source, self.tokenizer, self.seed, first + index, context, self.model.config.vocab_size)
            for index, source in enumerate(self.stage.sources)
        ]

    def _prepare_model(self) -> None:
        """Adapters, what trains and in which precision."""
        if self.stage.trains == "lora":
            torch.manual_seed(hash((self.seed, self.number)))  # the same adapters in every process, and run
            self.adapters = Adapters(self.model, self.stage.lora, self.grafts)
        parameters = trainable(self.model, self.stage, self.layers)
        if self.section.precision == "bf16":
            for parameter in parameters:
                parameter.data = parameter.data.float()
        if self.section.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        for frozen in (self.base, self.teacher.model if self.teacher else None):
            if frozen is not None:
                frozen.eval().requires_grad_(False).to(self.accelerator.device)
        if self.accelerator.is_fsdp2:
            self._use(twin(self.model, self.accelerator))
        elif self.base is not None:
            self.model.to(self._device)
            share_weights(self.model, self.base)
            if not self.section.compile:
                self.prefix = SharedPrefix.of(self.model, self.base)
        if self.section.compile:
            self.trained.compile()

    def _packs(self, model: nn.Module) -> bool:
        """Whether all models of this stage keep documents of one row apart; says so if not."""
        models = {"the model": model}
        if self.base is not None and self.stage.uses("keep"):
            models["the frozen base"] = self.base
        if self.teacher is not None:
            models["the teacher"] = self.teacher.model
        with self._precision():
            why = "torch.compile has not been tried with it" if self.section.compile else why_not(models)
        if why is not None and self.accelerator.is_main_process:
            _LOG.warning("train.packing: every document of %s has its own padded row (%s)", self.stage.name, why)
        return why is None

    def _make_whole(self) -> None:
        """What is sharded goes back into the model."""
        if self.trained is not self.model:
            gather(self.trained, self.model)
            self._use(self.model)

    def _use(self, model: PreTrainedModel) -> None:
        """From here on this one is stepped, saved and looked at."""
        self.trained = model
        if self.adapters is not None:
            self.adapters.model = model

    def _one_step(
        self, model: nn.Module, optimizer: Any, parameters: Sequence[nn.Parameter], step: int, start: int
    ) -> None:
        began, steps = time.perf_counter(), self.stage.num_steps
        torch.manual_seed(hash((self.seed, self.number, step, self.accelerator.process_index)))  # dropout
        set_learning_rates(optimizer, self.stage.optimizer, step, steps)
        losses, tokens = self._gradient(model, optimizer, step)
        norm = self.accelerator.clip_grad_norm_(parameters, self.stage.optimizer.max_grad_norm)
        if not (math.isfinite(losses["loss"]) and math.isfinite(float(norm))):
            raise self._diverged(step, str(losses["loss"]))
        if step == start and self.adapters is not None:
            self.adapters.check_reached()
        if self.folder and step > start and step % self.section.save_every == 0:
            # Only now: with these weights the next loss is finite.
            self._save(optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
        seconds = round(time.perf_counter() - began, 4)
        self.history.append({"step": self._before + step + 1, **losses, "tokens": tokens, "seconds": seconds})
        self._check_growth(step)
        if self.on_step is not None:
            self.on_step(self._before + step + 1, self.history[-1])

    def _gradient(self, model: nn.Module, optimizer: Any, step: int) -> tuple[dict[str, float], int]:
        """Forward and backward of the whole step; where memory does not do, once more in smaller pieces."""
        while True:
            micro = self._micro_batches(step)
            try:
                with compiling() if self.section.compile else nullcontext():
                    return self._run(model, micro, step)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                if not should_reduce_batch_size(error):
                    raise
                self._halve(step)
            optimizer.zero_grad()
            release_memory()

    def _halve(self, step: int) -> None:
        """Half as many documents at a time of the source that did not fit. Raises RunError where that is no way out."""
        assert self._running is not None
        rows, index = self._running.documents, self._running.index
        field_name = f"train.sources.{index}"
        if self.accelerator.num_processes > 1:
            hint = "Out of memory. The processes have to agree on the size beforehand: lower train.micro_batch."
            raise RunError(field_name, f"{rows} documents at a time", hint)
        if rows == 1:
            hint = "Out of memory with one document. Shorten it, or set train.gradient_checkpointing."
            raise RunError(field_name, f"{self._running.batch.input_ids.shape[1]} tokens", hint)
        self._at_once[index] = rows // 2
        _LOG.warning("step %d: out of memory; %s goes on with %d documents at a time", step + 1, field_name, rows // 2)

    def _run(self, model: nn.Module, micro: Sequence[MicroBatch], step: int) -> tuple[dict[str, float], int]:
        """Adds up the gradients of all micro-batches; the weighted losses, and the tokens of all processes."""
        progress = step / max(1, self.stage.num_steps - 1)
        parts: dict[str, Tensor] = {}
        for place, part in enumerate(micro):
            self._running, last = part, place + 1 == len(micro)
            self.accelerator.sync_gradients = last  # DeepSpeed steps where this is set
            with nullcontext() if last else self.accelerator.no_sync(model):
                with self._precision():
                    terms = self.losses(model, part.source, part.batch, part.counts, progress)
                    total = torch.stack(list(terms.values())).sum() * float(part.real)
                self.accelerator.backward(total)
            for name, term in terms.items():
                parts[name] = parts.get(name, 0.0) + term.detach() * float(part.real)
        names = sorted({n for source in self.stage.sources for n in source.weights.at(progress)} & set(parts))
        tokens = sum(int(m.batch.attention_mask.sum()) for m in micro if m.real)
        found = torch.stack([*(parts[n].float() for n in names), torch.tensor(float(tokens), device=self._device)])
        mean = [float(x) for x in self.accelerator.reduce(found, "mean")]
        losses = dict(zip(names, mean, strict=False))
        return {"loss": sum(losses.values()), **losses}, round(mean[-1] * self.accelerator.num_processes)

    def _precision(self) -> AbstractContextManager[None]:
        if self.section.precision == "fp32":
            return nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16)  # type: ignore[return-value]

    @property
    def _device(self) -> torch.device:
        return self.accelerator.device

    def _micro_batches(self, step: int) -> list[MicroBatch]:
        """This process's documents of the step, and by how much their losses are divided."""
        most = {i: self._at_once.get(i) or self.section.micro_batch for i in range(len(self.stage.sources))}
        documents = [stream.step(step) for stream in self._streams]
        micro = cut(self.stage.sources, documents, most, self.tokenizer, self.accelerator, self.packed)
        return counted(self.stage.sources, micro, bool(self.grafts), self.accelerator)

    def losses(
        self,
        model: nn.Module,
        source: Source,
        batch: EncodedBatch,
        counts: Mapping[str, float] | None = None,
        progress: float = 0.5,
    ) -> dict[str, Tensor]:
        """The objectives that have a weight on this source, each times its weight; `Terms.of`."""
        terms = Terms(self.stage.distil, self.grafts, self.base, self.prefix, self.teacher, self.cache)
        return terms.of(model, source, batch, counts, progress)

    def _check(self) -> None:
        """Raises RunError before the first step for what would fail in the middle."""
        if self.accelerator.distributed_type == DistributedType.FSDP and not self.accelerator.is_fsdp2:
            raise RunError("fsdp_version", 1, "Set fsdp_version: 2, as recipes/accelerate/fsdp2.yaml does.")
        if self.accelerator.is_fsdp2 and self.section.check_every is not None:
            hint = "While weights are sharded no process can answer alone: leave it out."
            raise RunError("train.check_every", self.section.check_every, hint)
        for index, source in enumerate(self.stage.sources):
            if source.rows is not None and source.rows < self.accelerator.num_processes:
                hint = f"Give at least one row to each of the {self.accelerator.num_processes} processes."
                raise RunError(f"train.sources.{index}.rows", source.rows, hint)
            if source.weights.uses("keep") and self.base is None:
                raise RunError(f"train.sources.{index}.weights.keep", 1.0, "Give the frozen base too.")
            if source.weights.uses(*FROM_TEACHER) and self.teacher is None:
                raise RunError("train.teacher", None, "distil, reading, mixing and hidden need a teacher.")

    def _resume(self, optimizer: Any) -> int:
        """Loads the newest checkpoint; returns the number of steps already done."""
        if self.folder is None:
            return 0
        state = load_step(self.folder, self.trained, optimizer, self._identity(), self.accelerator)
        if state is None:
            if self.number:
                self._save(optimizer, 0)  # what the earlier stages have left
            return 0
        self.history = state["history"]
        return int(state["step"])

    def _save(self, optimizer: Any, step: int) -> None:
        assert self.folder is not None
        state = {"of": self._identity(), "history": self.history}
        save_step(self.folder, self.trained, optimizer, step, state, self.accelerator)

    def _identity(self) -> str:
        """What two trainings have in common that may go on from each other's steps."""
        shapes = {name: list(p.shape) for name, p in self.model.named_parameters()}
        beside = {"save_every", "no_splice", "trackers", "check_every"}
        return fingerprint([self.section.model_dump(mode="json", exclude=beside), self.number, self.seed, shapes])

    def _check_growth(self, step: int) -> None:
        """Raises TrainingDiverged where a loss has grown since the first step; `growth.grown`."""
        mine = [entry for entry in self.history if entry["step"] > self._before]
        found = grown(mine, self.stage, self.model.config.vocab_size)
        if found is not None:
            raise self._diverged(step, found)

    def _diverged(self, step: int, loss: str) -> TrainingDiverged:
        found = checkpoints(self.folder) if self.folder else []
        kept = f"The last good step is kept in {found[-1].name}." if found else "No step was saved yet."
        hint = f"{kept} Try smaller train.optimizer.lr and new_heads_lr, a longer warmup, or check the data."
        return TrainingDiverged(f"train step {self._before + step + 1}", f"loss {loss}", hint)
