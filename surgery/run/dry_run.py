"""Estimate what a run does and costs from configs only (`--dry-run`). Loads no weights and writes nothing."""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.base_text import save_texts, stand_in
from surgery.data.tokenizer import build_tokenizer
from surgery.errors import ModelError, SurgeryError
from surgery.export.chat_template import with_chat_template
from surgery.files.atomic import read_json
from surgery.files.shipped import local_path
from surgery.locate.batches import PromptBatches
from surgery.locate.memory import locate_memory
from surgery.models.cache import cache_of_one_token
from surgery.models.inserted import as_inserted, has_inserted, inserted_entries
from surgery.models.loading import load_config, load_tokenizer
from surgery.models.lookup import family_of, geometry_of
from surgery.models.runtime import run_device, stays_in_fp32
from surgery.models.sizes import meta_model
from surgery.models.spliced import plan_of_hybrid
from surgery.models.torch_scans import code_text
from surgery.recipe import Base, Hardware, Recipe, Splice, TrainStage, as_base, to_yaml
from surgery.recipe.inputs import inputs_of
from surgery.run.context import Run
from surgery.run.folder import RunDir
from surgery.run.machine import GIB, find_machine
from surgery.run.memory_estimate import SourceSample, StepCost, sample_sources, step_cost
from surgery.run.pipeline import stages_of
from surgery.run.without_weights import at_hand, cached_folder, check_without_weights
from surgery.splice.insertion import inserted_config
from surgery.splice.plan import hybrid_config, make_plan, splice_field
from surgery.train.optimizer import base_size, learning_rates_text
from surgery.train.teacher import Teacher
from surgery.train.training import make_accelerator, train_model
from surgery.types import HeadId, HeadSet, Plan, ScoredHead, head_set_from_json

LENGTHS = {"1k": 1024, "8k": 8 * 1024, "32k": 32 * 1024, "128k": 128 * 1024}

STEPS = 3  # of each stage that are run; the first is not counted
_MOST_BYTES = 2 * 2**30  # of a training that is run to be timed
_MOST_FLOPS = {"cpu": 1e11, "cuda": 1e13}  # of a step that is run to be timed

Costs = list[tuple[TrainStage, tuple[SourceSample, ...], StepCost]]  # of one training step of every stage


def dry_run(recipe: Recipe, folder: Path, path: Path | None = None, overwrite: bool = False) -> dict[str, Any]:
    """Estimate heads, sizes, memory, FLOPs and cache bytes of a run, and whether it fits the hardware or this machine.

    If no heads are located yet, the estimate uses the first heads of the middle layer.

    Args:
        recipe: the validated recipe.
        folder: run folder. Heads located there with the same settings are used.
        path: the recipe's file. If `base.model` is a Hub id, its config is read from `configs/` next to this file.
        overwrite: as in `run_pipeline`.

    Returns:
        Plain data for `commands.tables.print_plan`.

    Raises:
        SurgeryError: the run would fail on the recipe, the folder or a model before it loads weights.
    """
    RunDir(folder).check(to_yaml(recipe), overwrite, inputs_of(recipe, path))
    check_without_weights(recipe, path)
    base, shapes_from = at_hand(recipe.base, path)
    config = load_config(base)
    plan, fields, heads_from = _planned(recipe, config, folder, path)
    plain = _as_loaded(meta_model(config, base.trust_remote_code), recipe.base)
    hybrid = _hybrid(config, plan, fields, recipe)
    parameters, own = hybrid.num_parameters(), base_size(hybrid)
    caches = {}
    for name, model in (("base", plain), ("hybrid", hybrid)):
        if name == "hybrid" or recipe.splice is not None:  # otherwise the base is the hybrid
            state, kv = (sum(t.nbytes for t in tensors) for tensors in cache_of_one_token(model))
            by_length = {length: state + kv * tokens for length, tokens in LENGTHS.items()}
            caches[name] = {"state": state, "kv_per_token": kv, **by_length}
    tokenizer, counted_with = _tokenizer(recipe.base, online=not shapes_from)
    with_chat_template(tokenizer, recipe.export.chat_template)
    locating = ""
    if recipe.splice is not None:
        locating = str(locate_memory(PromptBatches(plain, tokenizer, recipe.locate, recipe.seed)))
    processes = recipe.hardware.count
    costs: Costs = []
    for number, stage in enumerate(recipe.train.sequence):
        samples = sample_sources(stage, recipe.seed, tokenizer, processes, recipe.train.micro_batch)
        frozen, teacher = plain if "base.logits" in stage.needs else None, None
        if recipe.train.teacher is not None and stage.needs_teacher:
            of_recipe = as_base(recipe.train.teacher, "train.teacher.model")
            model = _as_loaded(meta_model(load_config(at_hand(of_recipe, path)[0])), of_recipe)
            teacher = Teacher(model, tokenizer, hybrid.config, plan.grafts, stage.align, stage.needs)
        cost = step_cost(hybrid, frozen, plan.grafts, recipe.train, samples, number, teacher, processes)
        costs.append((stage, samples, cost))
    return {
        "shapes_from": shapes_from,
        "notes": recipe.notes,
        "heads": [str(h) for h in plan.heads],
        "heads_from": heads_from,
        "sites": fields,
        "parameters": parameters,
        "base_parameters": plain.num_parameters() if recipe.splice is not None else None,
        "new_parameters": parameters - own,
        "trainable_parameters": max(cost.trained for _, _, cost in costs),
        "learning_rates": learning_rates_text(recipe.train.at_size(base_size(plain))),
        "cache": caches,
        "locating": locating,
        "code": code_text(hybrid, run_device(), recipe.train.compile),
        **_training(recipe, costs, counted_with),
        "time": _estimate_time(recipe, costs, tokenizer, plan, hybrid, plain),
        "fits": _fits(max((cost for _, _, cost in costs), key=lambda c: c.total), recipe.hardware),
    }


def _planned(
    recipe: Recipe, config: PreTrainedConfig, folder: Path, path: Path | None
) -> tuple[Plan, list[dict[str, Any]], str]:
    """Return the plan, the config field `splice`, and the origin of the heads."""
    if recipe.splice is None:
        plan = plan_of_hybrid(config, recipe.base.model)  # refuses a model without a splice
        return plan, inserted_entries(config) or config.splice, "in the hybrid"
    heads, locate, earlier = None, stages_of(recipe)[0], RunDir(folder)
    if earlier.manifest(locate.name) is not None:
        key = locate.key(Run(recipe, folder, make_accelerator()))
        if earlier.is_finished(locate.name, key, ("heads.json",)):
            heads = head_set_from_json(read_json(folder / "heads.json"))
    teacher = None
    if recipe.splice.teacher is not None:
        teacher = load_config(at_hand(as_base(recipe.splice.teacher, "splice.teacher.model"), path)[0])
    plan = make_plan(heads or _stand_in(recipe, recipe.splice, config), config, recipe.splice, recipe.seed, teacher)
    origin = "located" if heads else "listed" if recipe.splice.heads else "stand-in"
    if recipe.splice.form != "head":
        return plan, inserted_entries(inserted_config(plan, config, recipe.splice)), origin
    return plan, splice_field(plan, config, recipe.splice, teacher), origin


def _training(recipe: Recipe, costs: Costs, counted_with: str) -> dict[str, Any]:
    """Summarize steps, tokens, FLOPs and memory. `run` is the sum over all trained arms, `step` the largest step."""
    processes = recipe.hardware.count
    stage, batches, worst = max(costs, key=lambda entry: entry[2].total)
    rows, columns = batches[worst.largest].batch.input_ids.shape
    trained = [stage.num_steps * recipe.arms_of(stage) for stage, _, _ in costs]
    tokens = [round(cost.tokens * processes) for _, _, cost in costs]
    flops = [cost.flops * processes for _, _, cost in costs]
    documents = sum(sum(sample.rows for sample in samples) * stage.num_steps for stage, samples, _ in costs)
    return {
        "steps": recipe.train.num_all_steps,
        "until_plateau": recipe.train.has_plateau,
        "arms": 2 if recipe.has_control else 1,
        "documents": round(documents * processes),
        "tokens": {"step": max(tokens), "run": sum(t * n for t, n in zip(tokens, trained, strict=True))},
        "tokens_counted_with": counted_with,
        "flops": {"step": max(flops), "run": sum(f * n for f, n in zip(flops, trained, strict=True))},
        "largest": {"source": stage.sources[worst.largest].name, "rows": rows, "tokens": columns},
        "memory": {**worst.memory, "total": worst.total},
    }


def _fits(cost: StepCost, hardware: Hardware) -> dict[str, Any] | None:
    """Check whether one process fits its device, by default this machine. None if its memory is not known."""
    name, memory = hardware.gpu or "device", hardware.memory_gib
    if memory is None:
        if hardware.gpu is not None or hardware.count > 1:
            return None
        machine = find_machine()
        name, memory = f"This machine ({machine.name})", machine.memory_gib
    left = round(memory * GIB) - cost.total
    return {"gpu": name, "count": hardware.count, "memory_gib": memory, "fits": left >= 0, "left": left}


def _stand_in(recipe: Recipe, splice: Splice, config: PreTrainedConfig) -> HeadSet:
    """Use the heads that the recipe lists, or else the first heads of the layers nearest to the middle."""
    sites = family_of(config).sites(config)
    chosen = [HeadId.parse(h) for h in splice.heads]
    if not chosen and sites:
        middle = sites[len(sites) // 2].layer
        near = sorted(sites, key=lambda spec: abs(spec.layer - middle))
        chosen = [head for spec in near for head in spec.heads][: splice.num_heads]
    scored = tuple(ScoredHead(h, "neither", "answer_token", {}) for h in chosen)
    return HeadSet(recipe.base.model, "", geometry_of(config), (), scored, "stand-in", recipe.seed)


def _hybrid(config: PreTrainedConfig, plan: Plan, fields: list[dict[str, Any]], recipe: Recipe) -> PreTrainedModel:
    if plan.grafts[0].form != "head":
        config = config if has_inserted(config) else inserted_config(plan, config, recipe.splice)
        return _as_loaded(as_inserted(meta_model(config)), recipe.base)
    with torch.device("meta"):
        hybrid = family_of(config).build_hybrid(hybrid_config(config, fields, recipe.state_size))
    return _as_loaded(hybrid, recipe.base)


def _as_loaded(model: PreTrainedModel, base: Base) -> PreTrainedModel:
    """Set the dtypes that a run would use. Parameters that the class keeps in fp32 stay in fp32."""
    dtype_of_recipe = model.config.dtype if base.dtype == "auto" else getattr(torch, base.dtype)
    for name, parameter in model.named_parameters():
        dtype = torch.float32 if stays_in_fp32(model, name) else dtype_of_recipe or torch.float32
        parameter.data = parameter.data.to(dtype)
    return model


def _tokenizer(base: Base, online: bool) -> tuple[PreTrainedTokenizerBase, str]:
    """Load the base's tokenizer, or else the toolkit's small one. Also return a note on which one it is.

    Args:
        online: whether the Hub may be requested.
    """
    source = base.tokenizer or base.model
    cached = cached_folder(source, "tokenizer.json", None if base.tokenizer else base.revision)
    if cached is not None or Path(local_path(source)).exists() or online:
        try:
            there = base if cached is None else base.model_copy(update={"tokenizer": str(cached)})
            return load_tokenizer(there), "its own tokenizer"
        except ModelError:
            pass  # the estimate works without it, and the run reports the error
    note = "the toolkit's small tokenizer, because its own is not available: about 5 tokens a key-value pair"
    return build_tokenizer(), note


def _estimate_time(
    recipe: Recipe,
    costs: Costs,
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan,
    hybrid: PreTrainedModel,
    base: PreTrainedModel,
) -> dict[str, Any] | None:
    """Estimate the seconds of training, for all arms: by `hardware.tflops`, or by a few steps on this machine.

    Returns:
        `seconds` of the training, `step`: seconds of the longest step, `measured_on`: the device, or "" with
        `hardware.tflops`, and `load`: the number of waiting or running processes per CPU before the measurement, 0 if
        it is not known. None if the steps are too large to run here, or cannot run.
    """
    device, load = "", 0.0
    if recipe.hardware.tflops is not None:
        by_stage = [cost.flops / (recipe.hardware.tflops * 1e12) for _, _, cost in costs]
    else:
        device = make_accelerator().device.type
        fits = all(cost.total <= _MOST_BYTES and cost.flops <= _MOST_FLOPS.get(device, 0.0) for _, _, cost in costs)
        # Compiling takes longer than the steps, and a teacher would need its weights.
        if not fits or recipe.train.compile or recipe.train.needs_teacher or recipe.hardware.count > 1:
            return None
        load = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0
        try:
            by_stage = _timed(recipe, tokenizer, plan, hybrid, base)
        except SurgeryError:  # the run would report it, with its own weights
            return None
    steps = [stage.num_steps * recipe.arms_of(stage) for stage, _, _ in costs]
    seconds = sum(step * n for step, n in zip(by_stage, steps, strict=True))
    return {"seconds": seconds, "step": max(by_stage), "measured_on": device, "load": load}


def _timed(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, plan: Plan, hybrid: PreTrainedModel, base: PreTrainedModel
) -> list[float]:
    """Train a few steps of every stage with random weights. Return the seconds of a step, by stage."""
    short = {"steps": STEPS, "tokens": None, "plateau": None}
    stages = tuple(stage.model_copy(update=short) for stage in recipe.train.sequence)
    train = recipe.train.model_copy(update={"check_every": None, "trackers": (), "stages": stages})
    accelerator = make_accelerator()
    frozen = _random(base).to(accelerator.device) if "base.logits" in train.needs else None
    model = _random(hybrid)
    with TemporaryDirectory() as scratch:
        texts = Path(scratch, "texts.jsonl")
        if train.base_texts is not None:
            count, tokens = train.base_texts
            save_texts(texts, [stand_in(tokenizer, tokens).text] * count)
        history = train_model(model, tokenizer, train, plan, frozen, recipe.seed, None, accelerator, texts=texts)
    entries = [history[i : i + STEPS] for i in range(0, len(history), STEPS)]
    return [statistics.median(entry["seconds"] for entry in stage[1:]) for stage in entries]


def _random(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model on the meta device small random weights on the CPU, and no gradients."""
    model.zero_grad()
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02, generator=generator)
        for buffer in model.buffers():
            buffer.zero_()
    return model
