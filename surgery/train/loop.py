"""The training loop. Owns: steps, parameter groups, schedule, checkpoints to resume from, the guard against NaN.

Must never know: recipes of other stages, how heads are located. One loop pretrains the small base, trains the hybrid
and trains its control. A step's data and learning rate depend on the step's number alone, so a run that was killed
and goes on ends with the same weights as one that was not.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import RunError, TrainingDiverged
from surgery.heads import Graft
from surgery.hybrid.attention import SplicedAttention
from surgery.probes.documents import EncodedBatch, encode
from surgery.recipe import Optimizer, Source, Train
from surgery.rundir import fingerprint, new_folder, sweep
from surgery.train.data import step_documents
from surgery.train.objectives import answer_loss, attention_loss, keep_loss, text_loss

OnStep = Callable[[int, dict[str, float]], None]


@dataclass
class Trainer:
    """One training: a model, what it is trained on, and where its checkpoints go.

    Attributes:
        model: trained in place.
        base: the frozen model that `keep` compares with; needed when a source gives `keep` a weight.
        grafts: the spliced heads, which `attention` supervises; none for a control or a pretraining.
        folder: holds `step_*/`, the checkpoints to resume from; only the newest is kept. None keeps none.
        on_step: called on every process after each step with the losses.
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
    history: list[dict[str, float]] = field(default_factory=list)

    def run(self) -> list[dict[str, float]]:
        """Trains to the last step, from the newest checkpoint if there is one; returns the losses of every step.

        Raises:
            TrainingDiverged: loss or gradient is not finite; the last good checkpoint stays.
        """
        self._check_sources()
        self.model.train()
        parameters = trainable(self.model, self.section)
        optimizer = _adamw(self.model, parameters, self.section.optimizer)
        model, optimizer = self.accelerator.prepare(self.model, optimizer)
        if self.base is not None:
            self.base.eval().requires_grad_(False).to(self.accelerator.device)
        start = self._resume(self.folder, optimizer) if self.folder else 0
        for step in range(start, self.section.steps):
            began = time.perf_counter()
            _set_learning_rates(optimizer, self.section.optimizer, step, self.section.steps)
            losses = self._step(model, step)
            norm = self.accelerator.clip_grad_norm_(parameters, self.section.optimizer.max_grad_norm)
            if not (math.isfinite(losses["loss"]) and math.isfinite(float(norm))):
                raise self._diverged(step, losses["loss"])
            if self.folder and step > start and step % self.section.save_every == 0:
                self._save(self.folder, optimizer, step)  # only now: with these weights the next loss is finite
            optimizer.step()
            optimizer.zero_grad()
            self.history.append({"step": step + 1, **losses, "seconds": round(time.perf_counter() - began, 4)})
            if self.on_step is not None:
                self.on_step(step + 1, losses)
        if not all(bool(p.isfinite().all()) for p in parameters):
            raise self._diverged(self.section.steps - 1, math.nan)
        self.accelerator.free_memory()
        self.model.eval()
        return self.history

    def _step(self, model: nn.Module, step: int) -> dict[str, float]:
        """Forward and backward of every source; gradients add up. Returns the weighted losses."""
        parts: dict[str, float] = {}
        last = len(self.section.sources) - 1
        for index, source in enumerate(self.section.sources):
            batch = self._batch(source, index, step)
            with nullcontext() if index == last else self.accelerator.no_sync(model):
                terms = self.losses(model, source, batch)
                total = torch.stack(list(terms.values())).sum()
                self.accelerator.backward(total)
            for name, term in terms.items():
                parts[name] = parts.get(name, 0.0) + term.item()
        mean = self.accelerator.reduce(torch.tensor(list(parts.values()), device=self.accelerator.device), "mean")
        losses = dict(zip(parts, [float(x) for x in mean], strict=True))
        return {"loss": sum(losses.values()), **losses}

    def _batch(self, source: Source, index: int, step: int) -> EncodedBatch:
        documents = step_documents(source, self.seed, index, step)
        mine = documents[self.accelerator.process_index :: self.accelerator.num_processes]
        return encode(mine, self.tokenizer).to(self.accelerator.device)

    def losses(self, model: nn.Module, source: Source, batch: EncodedBatch) -> dict[str, torch.Tensor]:
        """The objectives that have a weight on this source, each times its weight."""
        weights = source.weights
        supervise = weights.attention > 0 and bool(self.grafts)
        extra = {"splice_queries": batch.query} if supervise else {}
        output = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, **extra)
        terms: dict[str, torch.Tensor] = {}
        if weights.answer > 0:
            terms["answer"] = weights.answer * answer_loss(output.logits, batch)
        if supervise:
            reads = [graft.reads for graft in self.grafts]
            terms["attention"] = weights.attention * attention_loss(output.splice_attentions, reads, batch)
        if weights.keep > 0:
            assert self.base is not None
            with torch.no_grad():
                base = self.base(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
            terms["keep"] = weights.keep * keep_loss(output.logits, base, batch)
        if weights.text > 0:
            terms["text"] = weights.text * text_loss(output.logits, batch)
        if not terms.keys() & {"answer", "keep", "text"}:
            terms["none"] = output.logits.sum() * 0  # every parameter takes part, or DDP waits for it
        return terms

    def _check_sources(self) -> None:
        """Raises RunError before the first step for what would fail in the middle."""
        for index, source in enumerate(self.section.sources):
            if source.rows < self.accelerator.num_processes:
                hint = f"Give at least one row to each of the {self.accelerator.num_processes} processes."
                raise RunError(f"train.sources.{index}.rows", source.rows, hint)
            if source.weights.keep > 0 and self.base is None:
                raise RunError(f"train.sources.{index}.weights.keep", source.weights.keep, "Give the frozen base too.")
        if self.section.trains == "new_heads" and not spliced_parameters(self.model):
            raise RunError("train.trains", "new_heads", "The model has no spliced heads: nothing would train.")

    def _save(self, where: Path, optimizer: Any, step: int) -> None:
        """Writes `step_*/` whole, then drops the older ones."""
        if self.accelerator.is_main_process:
            target = where / f"step_{step:06d}"
            with new_folder(target) as folder:
                weights = {k: v.detach().cpu().contiguous() for k, v in self.model.named_parameters()}
                save_file(weights, folder / "model.safetensors")
                torch.save(optimizer.state_dict(), folder / "optimizer.pt")
                (folder / "state.json").write_text(
                    json.dumps({"step": step, "of": self._identity(), "history": self.history})
                )
            for old in checkpoints(where):
                if old != target:
                    shutil.rmtree(old)
        self.accelerator.wait_for_everyone()

    def _resume(self, where: Path, optimizer: Any) -> int:
        """Loads the newest checkpoint; returns the number of steps already done."""
        if where.exists() and self.accelerator.is_main_process:
            sweep(where)
        self.accelerator.wait_for_everyone()
        found = checkpoints(where)
        if not found:
            return 0
        state = json.loads((found[-1] / "state.json").read_text())
        if state["of"] != self._identity():
            raise RunError(
                "steps", str(found[-1]), "It belongs to another training. Delete it, or name another folder."
            )
        weights = load_file(found[-1] / "model.safetensors")
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])
        optimizer.load_state_dict(torch.load(found[-1] / "optimizer.pt", weights_only=True, map_location="cpu"))
        self.history = state["history"]
        return int(state["step"])

    def _identity(self) -> str:
        """What two trainings have in common that may go on from each other's steps."""
        shapes = {name: list(p.shape) for name, p in self.model.named_parameters()}
        section = self.section.model_dump(mode="json", exclude={"save_every", "no_splice"})
        return fingerprint([section, self.seed, shapes])

    def _diverged(self, step: int, loss: float) -> TrainingDiverged:
        found = checkpoints(self.folder) if self.folder else []
        kept = f"The last good step is kept in {found[-1].name}." if found else "No step was saved yet."
        hint = f"{kept} Try smaller train.optimizer.lr and new_heads_lr, a longer warmup, or check the data."
        return TrainingDiverged(f"train step {step + 1}", f"loss {loss}", hint)


def checkpoints(folder: Path) -> list[Path]:
    """The `step_*` folders, oldest first."""
    return sorted(p for p in folder.glob("step_*") if re.fullmatch(r"step_\d+", p.name))


def spliced_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of the spliced heads, each once."""
    return [p for m in model.modules() if isinstance(m, SplicedAttention) for p in m.parameters()]


def trainable(model: nn.Module, section: Train) -> list[nn.Parameter]:
    """Marks what trains, and returns it. Every other parameter is frozen."""
    chosen = spliced_parameters(model) if section.trains == "new_heads" else list(model.parameters())
    model.requires_grad_(False)
    for parameter in chosen:
        parameter.requires_grad_(True)
    return chosen


def _adamw(model: nn.Module, parameters: Sequence[nn.Parameter], settings: Optimizer) -> torch.optim.AdamW:
    """AdamW over two groups, new heads and the rest; vectors (norms, biases, scales, A_log, D) do not decay."""
    new = {id(p) for p in spliced_parameters(model)}
    groups = []
    for is_new, lr in ((True, settings.new_heads_lr), (False, settings.lr)):
        for decays in (True, False):
            members = [p for p in parameters if (id(p) in new) == is_new and (p.ndim > 1) == decays]
            if members:
                decay = settings.weight_decay if decays else 0.0
                groups.append({"params": members, "lr": lr, "peak_lr": lr, "weight_decay": decay})
    return torch.optim.AdamW(groups, betas=settings.betas)


def learning_rate_factor(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, then a cosine to zero; the share of the peak at `step`, counted from 0."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _set_learning_rates(optimizer: Any, settings: Optimizer, step: int, steps: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * learning_rate_factor(step, steps, settings.warmup)
