"""Train a hybrid or its control, or pretrain a small base: one stage after the other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import RunError, summary
from surgery.files.atomic import fingerprint
from surgery.models.loading import check_vocabulary, load_model, load_tokenizer, revision_of
from surgery.recipe import Train, TrainStage, as_base, check_recipe
from surgery.recipe.objectives import OBJECTIVES, needs_of
from surgery.train.checkpoints import checkpoints, set_aside_broken
from surgery.train.logits_cache import LogitsCache
from surgery.train.numerics import precision_of
from surgery.train.optimizer import base_size
from surgery.train.quantization import quantization_of, quantized, resume_unquantized
from surgery.train.shared_prefix import unshare_bases
from surgery.train.targets import Targets
from surgery.train.teacher import Teacher, check_tokenizers
from surgery.train.tracking import tracked
from surgery.train.trainer import History, OnStep, StageTrainer
from surgery.types import Graft, Plan

_PRECISION = "The precision is the recipe's: set `train.precision`, and make the Accelerator without mixed_precision."
ADAPTERS = "adapters"  # folder of LoRA adapters in PEFT's format, in the run folder


def make_accelerator() -> Accelerator:
    """Create the Accelerator of this process, on the GPU if there is one.

    Raises:
        RunError: a launcher started several processes that do not communicate, so all of them would write; or this
            process has an Accelerator with mixed precision.
    """
    # The other processes wait this long while rank 0 evaluates and exports.
    timeout = InitProcessGroupKwargs(timeout=timedelta(days=1))
    # The loop runs autocast itself, in the recipe's precision, whatever the launcher or Accelerate's own file says.
    cpu = not torch.cuda.is_available()
    try:
        accelerator = Accelerator(cpu=cpu, mixed_precision="no", kwargs_handlers=[timeout])
    except ValueError as error:  # this process has an Accelerator with another precision already
        raise RunError("mixed_precision", summary(error), _PRECISION) from error
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != world:
        value = f"{accelerator.num_processes}, but WORLD_SIZE is {world}"
        hint = "Launch with torchrun, or with accelerate launch and one GPU for each process."
        raise RunError("num_processes", value, hint)
    return accelerator


def train_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    section: Train | dict[str, Any],
    plan: Plan | None = None,
    base: PreTrainedModel | None = None,
    seed: int = 0,
    folder: Path | str | None = None,
    accelerator: Accelerator | None = None,
    on_step: OnStep | None = None,
    control: bool = False,
    outputs: Path | None = None,
    texts: Path | None = None,
) -> list[dict[str, float]]:
    """Train a model in place, one stage after the other.

    Args:
        model: a hybrid, a control or a base.
        tokenizer: the model's.
        section: the recipe's section `train`, or plain data for it.
        plan: the spliced heads. Without it, objectives on the attention of new heads are skipped.
        base: the frozen model for the objective `base_kl`. Frozen weights that are equal in both models share their
            memory until another `train_model`. Copy the base before you change weights in place yourself.
        seed: of documents, adapters and dropout.
        folder: for the checkpoints to resume from. Training resumes from the newest one. None saves no checkpoints.
        accelerator: of this process; created by default.
        on_step: called after each step with its number and the history so far. An entry has losses, tokens, seconds,
            and `last_step` where a plateau was found. On a GPU, the last one may be that of the step before.
        control: True for the control, a model without a splice. Stages that train new heads only are skipped.
        outputs: folder for `adapters/` in PEFT's format (none of a stage after another one that changed the base's
            weights), `teacher_logits/` of stages with `distil.cache`, and `logs/` of trackers. None writes none.
        texts: file of `surgery.data.base_text.write_texts`, for sources with `base_text`.

    Returns:
        The entries of all steps.

    Raises:
        TrainingDiverged: loss or gradient is not finite, or the loss has grown. The last good checkpoint stays.
        RunError: the folder holds checkpoints of another training, or the accelerator has a precision of its own.
        DataError: a row of the user's data cannot be used.
        ModelError: the tokenizer is another model's.
    """
    if isinstance(section, dict):
        section = check_recipe(section, Train)
    check_vocabulary(tokenizer, model.config)
    accelerator = accelerator or make_accelerator()
    if accelerator.mixed_precision != "no":
        raise RunError("accelerator", f"mixed_precision is {accelerator.mixed_precision}", _PRECISION)
    section = section.at_size(base_size(model))
    grafts = plan.grafts if plan and not control else ()
    layers = sorted({graft.site.layer for graft in plan.grafts}) if plan else ()
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    stages = section.sequence
    numbers = [n for n, stage in enumerate(stages) if stage.trains_control or not control]
    root = None if folder is None else Path(folder)
    folders = {n: root / f"{n}-{stages[n].name}" if root and len(stages) > 1 else root for n in numbers}
    for saved in filter(None, folders.values()):
        set_aside_broken(saved, accelerator)
    newest = max((n for n, saved in folders.items() if saved and checkpoints(saved)), default=0)
    history: History = []
    logs = (outputs or Path()) / "logs" / ("no_splice" if control else "hybrid")
    trackers = section.trackers if outputs is not None else ()
    with tracked(accelerator, trackers, logs, {"seed": seed, "steps": section.num_all_steps}) as send_new:

        def log_step(step: int, entries: History) -> None:
            send_new(entries)
            if on_step is not None:
                on_step(step, entries)

        trainer_of = partial(
            StageTrainer, model, tokenizer, section, seed, accelerator, on_step=log_step, layers=layers, texts=texts
        )
        for number in (n for n in numbers if n >= newest):  # the earlier ones are finished
            stage, steps = stages[number], folders[number]
            teacher = load_teacher(section, stage, tokenizer, model, grafts) if stage.needs_teacher else None
            cache = open_cache(outputs, section, stage, tokenizer, model, accelerator)
            targets = Targets(grafts=grafts, base=base, teacher=teacher, cache=cache)
            settings, frozen = quantization_of(section, stage), () if base is None else (base,)
            # Weights that an earlier stage has changed are not those of `spliced/`.
            has_changed = any(stages[n].trains_control for n in numbers if n < number)
            if settings is not None and has_changed and steps is not None:
                resume_unquantized(model, steps, accelerator)
            with quantized((model, *frozen), settings, accelerator.device) as unquantized:
                trainer = trainer_of(targets, number, steps, history)
                history = trainer.run()
                send_new(history)
                if trainer.adapters is not None:
                    if outputs is not None and accelerator.is_main_process and not control and not has_changed:
                        several = sum(stage.trainable == "lora" for stage in stages) > 1
                        adapters = outputs / ADAPTERS / (stage.name if several else "")
                        trainer.adapters.save(adapters, str(model.name_or_path))
                    unshare_bases(model)  # merging changes weights in place
                    trainer.adapters.merge(unquantized)  # the next stage and the export need a plain model
            for name, parameter in model.named_parameters():
                parameter.data = parameter.data.to(dtypes[name])
    return history


def load_teacher(
    section: Train,
    stage: TrainStage,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    grafts: Sequence[Graft] = (),
) -> Teacher:
    """Load the recipe's teacher and check that it fits the model. Without grafts its attention is not needed."""
    assert section.teacher is not None
    teacher = as_base(section.teacher, "train.teacher.model")
    check_tokenizers(tokenizer, load_tokenizer(teacher))
    needs = needs_of(name for name in stage.objectives if grafts or not OBJECTIVES[name].needs_splice)
    return Teacher(load_model(teacher), tokenizer, model.config, grafts, stage.align, needs)


def open_cache(
    outputs: Path | None,
    section: Train,
    stage: TrainStage,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    accelerator: Accelerator,
) -> LogitsCache | None:
    """Open the cache of the teacher's logits in `teacher_logits/` of the outputs. None if the stage uses no cache.

    A student with another precision or vocabulary size, such as a `control`, gets a folder of its own.
    """
    if section.teacher is None or outputs is None or not (stage.distil.cache and "teacher.logits" in stage.needs):
        return None
    precisions = (section.teacher.dtype, precision_of(section, model))
    identity = {
        "teacher": revision_of(as_base(section.teacher, "train.teacher.model")),
        "tokenizer": fingerprint(sorted(tokenizer.get_vocab().items())),
        "top_k": stage.distil.top_k,
        "precision": ", ".join(precisions),
        "vocab_size": model.config.vocab_size,  # the teacher's logits are cut or padded to it
    }
    folder = "-".join([f"top{stage.distil.top_k}", *precisions, str(model.config.vocab_size)])
    with accelerator.main_process_first():  # which creates the cache
        return LogitsCache(outputs / "teacher_logits" / folder, identity, main=accelerator.is_main_process)
