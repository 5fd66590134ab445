"""Run the stages of a recipe in order, skip finished ones, resume an interrupted run.

A stage is fresh if its manifest matches the hashes of its inputs, its sections of the recipe and its version. Otherwise
it runs again. With several processes, all of them locate and train; only rank 0 runs the other stages and writes files.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedConfig

from surgery.data.offsets import encode_alike
from surgery.data.user import IndexedDocuments, named_data, open_source
from surgery.errors import PlanError, RecipeError, RunError
from surgery.evaluate.evaluation import held_out_documents
from surgery.evaluate.lm_eval import check_tasks
from surgery.evaluate.prompts import make_prompts
from surgery.export.chat_template import with_chat_template
from surgery.export.formats import ExportFormat
from surgery.files.lock import hold
from surgery.models.config_checks import check_unquantized
from surgery.models.donors import donor_mixers
from surgery.models.inserted import has_inserted
from surgery.models.loading import (
    check_finite,
    check_vocabulary,
    has_tokenizer,
    load_config,
    load_tokenizer,
)
from surgery.models.lookup import family_of
from surgery.models.sizes import meta_model
from surgery.models.spliced import plan_of_hybrid
from surgery.recipe import Recipe, Splice, as_base, to_yaml
from surgery.recipe.export import EXPORT_FORMATS, LAYER_FORMATS
from surgery.recipe.inputs import inputs_of
from surgery.recipe.methods import METHODS, RANKINGS, is_greedy
from surgery.report.results import answer_spans_text
from surgery.run.context import Reporter, Run, Silent
from surgery.run.log import logged
from surgery.run.sharing import find_origin, take_stage
from surgery.run.stages import Stage, stages_of
from surgery.run.without_weights import check_installed
from surgery.splice.plan import check_base, check_in_range, check_not_spliced
from surgery.train.lora import adapter_targets
from surgery.train.numerics import check_compiler
from surgery.train.teacher import check_teacher, check_tokenizers
from surgery.train.training import make_accelerator
from surgery.types import HeadId


def run_pipeline(
    recipe: Recipe,
    folder: Path,
    first: str | None = None,
    last: str | None = None,
    overwrite: bool = False,
    reporter: Reporter | None = None,
    file: Path | None = None,
    siblings: Sequence[Path] = (),
) -> Run:
    """Run the stages of a recipe from `first` to `last`. Finished stages are skipped.

    Args:
        recipe: the validated recipe.
        folder: run folder. It is locked until the run ends.
        first: start at this stage, even if it is finished. The stages before it must be finished with this recipe.
        last: stop after this stage.
        overwrite: remove a run of another recipe from `folder`.
        reporter: receives progress.
        file: the recipe's file, which must not lie in a folder that is removed.
        siblings: folders of other runs. A stage that one of them finished with the same key is copied from there.

    Returns:
        The run, with its folder and loaded models.

    Raises:
        RunError: a stage is unknown; the folder belongs to another recipe, to a running process or to no run; or an
            input is missing or would be removed.
        SurgeryError: a model, the data or a stage fails.
    """
    stages = stages_of(recipe)
    chosen = choose_stages(recipe, first, last)
    accelerator = make_accelerator()
    is_main = accelerator.is_main_process
    names = tuple(stage.name for stage in chosen)
    run = Run(
        recipe, folder, accelerator, reporter if reporter is not None and is_main else Silent(), names, tuple(siblings)
    )
    claim = to_yaml(recipe), overwrite, inputs_of(recipe, file)
    with hold(folder, "run folder") if is_main else nullcontext():
        if is_main:
            is_replaced = run.rundir.check(*claim)
        check_inputs(run)
        if is_main:
            _check_earlier_stages(run, stages[: stages.index(chosen[0])])
            changes = [] if is_replaced else run.rundir.changes(recipe)
            run.rundir.claim(*claim)
            if changes:
                run.reporter.note("recipe", changes_text(changes))
        accelerator.wait_for_everyone()
        with logged(run) if is_main else nullcontext():
            for stage in chosen:
                _run_stage(run, stage, forced=stage.name == first)
    return run


def choose_stages(recipe: Recipe, first: str | None, last: str | None) -> tuple[Stage, ...]:
    """Return the stages from `first` to `last`, or to the ends. Raises RunError for a name that is not a stage."""
    stages = stages_of(recipe)
    known = [stage.name for stage in stages]
    for option, name in (("--from", first), ("--to", last)):
        if name is not None and name not in known:
            tuned = " With splice: null the base is a hybrid already." if recipe.splice is None else ""
            raise RunError(option, name, f"Use one of the stages {', '.join(known)}.{tuned}")
    begin = known.index(first) if first else 0
    end = known.index(last) if last else len(stages) - 1
    if begin > end:
        raise RunError("--to", last, f"This stage comes before {first}. Set --to to {first} or a later stage.")
    return stages[begin : end + 1]


def changes_text(changes: Sequence[str], most: int = 3) -> str:
    """Describe changes of a run's recipe in one line. See `RunDir.changes`."""
    listed = [*changes[:most], *([f"{len(changes) - most} more"] if len(changes) > most else [])]
    return f"changed since the last run here: {'; '.join(listed)}. Stages that depend on it run again, others do not"


def check_inputs(run: Run) -> None:
    """Check models, heads and data before anything is written or measured."""
    check_configs(run)
    if "train" in run.stages:
        check_installed(run.recipe)
    check_vocabulary(run.tokenizer(), run.base().config)
    check_training_teacher(run)
    _check_other_models(run)
    check_documents(run, run.base().config)
    if "train" in run.stages:
        if run.accelerator.is_main_process:
            for text in run.recipe.notes:
                run.reporter.note("recipe", text)
            for name, counts in run.answer_spans.items():
                run.reporter.note("data", f"{name}: answer_span: auto: {answer_spans_text(counts)}")
        if run.recipe.train.compile:
            check_compiler(run.accelerator.device)


def check_documents(run: Run, config: PreTrainedConfig) -> None:
    """Check every row of the user's data, the prompts of the evaluation and the chat template. Loads no weights.

    Args:
        run: the run. Its stages say what is needed.
        config: of the base.
    """
    if "train" in run.stages:
        _check_data(run, config)
    if "evaluate" in run.stages:
        probes = tuple(p.model_copy(update={"examples": None}) for p in run.recipe.evaluate.tasks)
        few = run.recipe.evaluate.model_copy(update={"tasks": probes, "examples": 1, "sentences": 1})
        make_prompts(few, run.recipe.seed, tokenizer=run.tokenizer())
        if run.recipe.evaluate.lm_eval is not None:
            check_tasks(run.recipe.evaluate.lm_eval)
    if "export" in run.stages:
        with_chat_template(run.tokenizer(), run.recipe.export.chat_template)
        export_format: ExportFormat = EXPORT_FORMATS[run.recipe.export.format]()
        export_format.check_recipe(run.recipe.export, run.tokenizer())
        export_format.check_base(config)


def check_configs(run: Run) -> None:
    """Check that the base can be spliced, or that it is a hybrid, and where LoRA goes. Loads no weights."""
    recipe = run.recipe
    if recipe.splice is None:
        _check_hybrid(run)
    else:
        _check_base(run, recipe.splice)
    for stage in recipe.train.sequence if "train" in run.stages else ():
        if stage.trainable == "lora":
            adapter_targets(meta_model(load_config(recipe.base), recipe.base.trust_remote_code), stage.lora)


def check_training_teacher(run: Run) -> None:
    """Check that the teacher of the training has the base's tokenizer, and what the objectives compare."""
    train = run.recipe.train
    if "train" not in run.stages or train.teacher is None:
        return
    teacher = as_base(train.teacher, "train.teacher.model")
    if has_tokenizer(teacher):  # `configs/` holds shapes alone
        check_tokenizers(run.tokenizer(), load_tokenizer(teacher))
    config, student = load_config(teacher), load_config(run.recipe.base)
    for stage in train.sequence:
        check_teacher(config, run.tokenizer(), student, stage.align, stage.needs)


def _check_hybrid(run: Run) -> None:
    """Check that the base is a hybrid, and that the control has the same tokenizer and no splice."""
    recipe = run.recipe
    config = load_config(recipe.base)
    check_unquantized(config)
    plan_of_hybrid(config, recipe.base.model)
    wrong = ("transformers",) if has_inserted(config) else LAYER_FORMATS
    if recipe.export.format in wrong:
        kind = "layers that were inserted" if has_inserted(config) else "heads that were spliced into its layers"
        hint = f"The base has {kind}. Set {' or '.join(LAYER_FORMATS) if has_inserted(config) else 'transformers'}."
        raise RecipeError("export.format", recipe.export.format, hint)
    if recipe.control is None:
        return
    control = as_base(recipe.control, "control.model")
    try:
        check_not_spliced(load_config(control))
    except PlanError:
        hint = "The control must be a model without a splice, and this is a hybrid. Name the hybrid's own base."
        raise PlanError("control.model", recipe.control.model, hint) from None
    if not has_tokenizer(control):  # a checkpoint of mamba_ssm: it is trained with the hybrid's
        return
    if not encode_alike(load_tokenizer(recipe.base), load_tokenizer(control)):
        hint = "Its tokenizer differs from the hybrid's. Use a control with the same tokenizer."
        raise RecipeError("control.model", recipe.control.model, hint)


def _check_other_models(run: Run) -> None:
    """Check the models that later stages load."""
    recipe = run.recipe
    needed = {
        "control": (recipe.control, "control.model"),
        "train": (recipe.train.teacher, "train.teacher.model"),
        "splice": (recipe.teacher, "splice.teacher.model"),
    }
    for stage, (model, field) in needed.items():
        if model is not None and stage in run.stages:
            check_finite(as_base(model, field))
            if stage == "control":
                check_vocabulary(run.tokenizer(), load_config(as_base(model, field)), model.model)


def _check_data(run: Run, config: PreTrainedConfig) -> None:
    """Check the generated documents, every row of the user's data (not of streams), and the held-out rows.

    Reports the number of rows that `on_bad_row: skip` leaves out, if the data is not a stream.
    """
    train = run.recipe.train
    context, vocab_size = getattr(config, "max_position_embeddings", None), config.vocab_size
    names = {id(source): name for source, name in named_data(train)}
    for source in [source for stage in train.sequence for source in stage.sources]:
        documents = open_source(source, run.tokenizer(), run.recipe.seed, 0, context, vocab_size)
        if isinstance(documents, IndexedDocuments) and documents.skipped and id(source) in names:
            text = (
                f"{documents.skipped:,} rows cannot be used and are skipped. The first: {documents.reader.first_error}"
            )
            run.reporter.note("data", f"{names[id(source)]}: {text}")
    held_out_documents(train, run.tokenizer(), run.recipe.evaluate.examples, context, vocab_size)


def _check_base(run: Run, splice: Splice) -> None:
    """Check that the base can be spliced, if this run splices, and that it has the requested heads."""
    recipe = run.recipe
    config = load_config(recipe.base)
    only_locate = run.stages[-1] == "locate"  # a model that cannot be spliced can still be located
    if only_locate:
        check_unquantized(config)
        check_not_spliced(config)
        if not family_of(config).sites(config):
            return
    else:
        dtype = config.dtype if recipe.base.dtype == "auto" else getattr(torch, recipe.base.dtype)
        check_base(config, splice, dtype)
    measures_reads = [name for name, method in METHODS.items() if method.measures_reads]
    if not only_locate and "locate" in run.stages and not set(measures_reads) & set(recipe.locate.methods):
        names = " or ".join(measures_reads)
        hint = f"Add {names}: it measures which position a spliced head reads. Only `surgery locate` runs without it."
        raise RecipeError("locate.methods", list(recipe.locate.methods), hint)
    teacher = run.teacher_config()
    if teacher is not None:
        donor_mixers(teacher)
    for head in map(HeadId.parse, splice.heads):
        check_in_range(head, config, "splice.heads")
    heads = sum(spec.num_heads for spec in family_of(config).sites(config))
    if splice.num_heads > heads:
        raise PlanError(
            "splice.num_heads", splice.num_heads, f"The model has only {heads} heads. Set a smaller number."
        )
    method = RANKINGS[splice.select].name if splice.select in RANKINGS else ""
    if method in recipe.locate.trained and splice.num_heads > recipe.locate.candidates_of(method):
        hint = f"Set locate.{method}.candidates to {splice.num_heads} or more."
        raise PlanError("splice.num_heads", splice.num_heads, hint)
    if is_greedy(splice.select) and splice.num_heads > recipe.locate.top_k:
        raise PlanError("splice.num_heads", splice.num_heads, f"Set locate.top_k to at least {splice.num_heads}.")


def _check_earlier_stages(run: Run, stages: tuple[Stage, ...]) -> None:
    """Check that the stages before the first one are finished with the same settings. Their files may be edited."""
    for stage in stages:
        if not run.rundir.is_finished(stage.name, stage.key(run), stage.outputs(run)):
            hint = f"The stage {stage.name} is not finished, or was run with other settings. Run it first."
            raise RunError(run.stages[0], f"needs {stage.name}", hint)


def _run_stage(run: Run, stage: Stage, forced: bool) -> None:
    """Run a stage, unless it is finished or can be taken from a sibling.

    The `seconds` of its manifest are those of this session. If it resumed a training, they include the steps that
    earlier sessions trained and the checkpoint has kept. So every step counts once: steps after the checkpoint were
    lost, and are trained again. What every session repeats, such as loading the models, counts for this session alone,
    and `train.check_every` of earlier sessions does not count. The reporter gets the seconds of this session.
    """
    decided: list[Any] = [None, ""]
    if run.accelerator.is_main_process:
        key = stage.key(run)
        decided = [key, "" if forced else _skip(run, stage, key)]
    if run.accelerator.num_processes > 1:
        broadcast_object_list(decided)
    key, reason = decided
    if reason:
        run.reporter.skip(stage.name, reason)
        return
    began = time.perf_counter()
    is_empty = stage.name == "control" and not run.recipe.has_control
    if is_empty:
        run.reporter.note(stage.name, "the recipe has none")
    else:
        run.reporter.start(stage.name, stage.what)
    if run.accelerator.is_main_process:
        run.rundir.forget(stage.name)
    earlier = None
    if stage.together or run.accelerator.is_main_process:
        earlier = stage.work(run, key)
    run.accelerator.wait_for_everyone()
    seconds = time.perf_counter() - began
    if run.accelerator.is_main_process:
        run.rundir.finish(stage.name, key, stage.outputs(run), seconds + (earlier or 0.0))
    if not is_empty:
        run.reporter.finish(stage.name, seconds)


def _skip(run: Run, stage: Stage, key: str) -> str:
    """Return why the stage need not run: it is finished, or is taken from a sibling. Empty if it has to run."""
    if run.rundir.is_fresh(stage.name, key, stage.outputs(run)):
        return "already finished with the same inputs"
    origin = find_origin(run, stage, key) if run.siblings else None
    if origin is None:
        return ""
    take_stage(run, stage, key, origin)
    return str(origin)
