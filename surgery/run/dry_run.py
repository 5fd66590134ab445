"""What a run would do and cost, from configs alone: no weights are loaded, nothing is written. Owns: `--dry-run`.

Must never know: how it is printed, how a stage does its work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.tokenizer import build_tokenizer
from surgery.errors import ModelError
from surgery.files.atomic import read_json
from surgery.models.cache import CacheBytes, cache_bytes
from surgery.models.loading import load_config, load_tokenizer
from surgery.models.lookup import family_of, geometry_of
from surgery.models.runtime import shorten_chunks
from surgery.models.sizes import meta_model, sizes_of
from surgery.models.spliced import plan_of_hybrid
from surgery.recipe import Base, Hardware, Recipe, Splice, TrainStage, as_base
from surgery.run.context import Run
from surgery.run.folder import RunDir
from surgery.run.memory_estimate import MicroBatch, StepCost, micro_batches, step_cost
from surgery.run.stages import STAGES
from surgery.splice.plan import make_plan, splice_field
from surgery.train.training import make_accelerator
from surgery.types import HeadId, HeadSet, Plan, ScoredHead, head_set_from_json

LENGTHS = {"1k": 1024, "8k": 8 * 1024, "32k": 32 * 1024, "128k": 128 * 1024}
GIB = 2**30


def dry_run(recipe: Recipe, folder: Path, path: Path | None = None) -> dict[str, Any]:
    """Heads, sizes, memory, FLOPs, cache bytes, and whether it fits; plain data.

    Heads that are not located yet are stood in for by the first heads of the middle layer: counts are the same.

    Args:
        folder: of the run, for heads that were located there.
        path: of the recipe. Where `base.model` is a Hub id, the shapes in `configs/` beside it save a connection.

    Raises:
        SurgeryError: what the run itself would refuse before it loads weights.
    """
    base, shapes_from = _at_hand(recipe.base, path)
    config = load_config(base)
    plan, fields, heads_from = _planned(recipe, config, folder, path)
    plain = _as_loaded(meta_model(config, base.trust_remote_code), recipe.base)
    hybrid = _hybrid(config, fields, recipe.base)
    before, after = sizes_of(plain), sizes_of(hybrid)
    caches = {"base": _cache(cache_bytes(plain)), "hybrid": _cache(cache_bytes(hybrid))}
    if recipe.splice is None:  # they are one
        del caches["base"]
    tokenizer, counted_with = _tokenizer(recipe.base, may_ask=not shapes_from)
    processes = recipe.hardware.count
    costs, trainable = [], 0
    for number, stage in enumerate(recipe.train.sequence):
        batches = micro_batches(stage, recipe.seed, tokenizer, processes, recipe.train.micro_batch)
        frozen = plain if stage.uses("keep") else None
        costs.append((stage, batches, step_cost(hybrid, frozen, plan.grafts, recipe.train, batches, number)))
        trainable = max(trainable, sum(p.numel() for p in hybrid.parameters() if p.requires_grad))
    return {
        "shapes_from": shapes_from,
        "heads": [str(h) for h in plan.heads],
        "heads_from": heads_from,
        "sites": fields,
        "parameters": before.parameters,
        "new_parameters": after.new_parameters,
        "trainable_parameters": trainable,
        "cache": caches,
        **_training(recipe, costs, counted_with),
        "fits": _fits(max((cost for _, _, cost in costs), key=lambda c: c.memory.total), recipe.hardware),
    }


def _planned(
    recipe: Recipe, config: PreTrainedConfig, folder: Path, path: Path | None
) -> tuple[Plan, list[dict[str, Any]], str]:
    """The plan, the config field it makes, and where its heads are from."""
    if recipe.splice is None:
        return plan_of_hybrid(config, recipe.base.model), config.splice, "in the hybrid"
    heads = _located(recipe, folder)
    teacher = load_config(_at_hand(as_base(recipe.splice.teacher), path)[0]) if recipe.splice.teacher else None
    plan = make_plan(heads or _stand_in(recipe, recipe.splice, config), config, recipe.splice, recipe.seed, teacher)
    said = "located" if heads else "listed" if recipe.splice.heads else "stand-in"
    return plan, splice_field(plan, config, recipe.splice, teacher), said


def _training(
    recipe: Recipe, costs: Sequence[tuple[TrainStage, tuple[MicroBatch, ...], StepCost]], counted_with: str
) -> dict[str, Any]:
    """Steps, tokens, FLOPs and memory; the run's are those of all arms that train, a step's those of the largest."""
    processes = recipe.hardware.count
    arms = 2 if recipe.has_control else 1
    stage, batches, worst = max(costs, key=lambda found: found[2].memory.total)
    rows, columns = batches[worst.largest].shape
    lengths = [stage.num_steps for stage, _, _ in costs]
    tokens = [round(cost.tokens * processes) for _, _, cost in costs]
    flops = [cost.flops * processes for _, _, cost in costs]
    documents = sum(sum(micro.rows for micro in found) * n for (_, found, _), n in zip(costs, lengths, strict=True))
    return {
        "steps": recipe.train.num_all_steps,
        "arms": arms,
        "documents": round(documents * processes),
        "tokens": {"step": max(tokens), "run": sum(t * n for t, n in zip(tokens, lengths, strict=True)) * arms},
        "tokens_counted_with": counted_with,
        "flops": {"step": max(flops), "run": sum(f * n for f, n in zip(flops, lengths, strict=True)) * arms},
        "largest": {"source": stage.sources[worst.largest].name, "rows": rows, "tokens": columns},
        "memory": {**asdict(worst.memory), "total": worst.memory.total},
    }


def _fits(cost: StepCost, hardware: Hardware) -> dict[str, Any] | None:
    """Whether one process's share fits its device, and what is left; None where the recipe names no memory."""
    if hardware.memory_gib is None:
        return None
    left = round(hardware.memory_gib * GIB) - cost.memory.total
    name = hardware.gpu or "device"
    return {"gpu": name, "count": hardware.count, "memory_gib": hardware.memory_gib, "fits": left >= 0, "left": left}


def _cache(found: CacheBytes) -> dict[str, Any]:
    return {"state": found.state, "kv_per_token": found.per_token, **{k: found.at(n) for k, n in LENGTHS.items()}}


def _stand_in(recipe: Recipe, splice: Splice, config: PreTrainedConfig) -> HeadSet:
    """The heads that the recipe lists, or the first ones around the middle layer."""
    sites = family_of(config).sites(config)
    chosen = [HeadId.parse(h) for h in splice.heads]
    if not chosen and sites:
        middle = sites[len(sites) // 2].layer
        near = sorted(sites, key=lambda spec: abs(spec.layer - middle))
        chosen = [head for spec in near for head in spec.heads][: splice.num_heads]
    scored = tuple(ScoredHead(h, "neither", "answer_token", {}) for h in chosen)
    return HeadSet(recipe.base.model, "", geometry_of(config), (), scored, "stand-in", recipe.seed)


def _hybrid(config: PreTrainedConfig, fields: list[dict[str, Any]], base: Base) -> PreTrainedModel:
    family = family_of(config)
    hybrid_config = family.hybrid_config(config, fields)
    hybrid_config._attn_implementation = "sdpa"
    with torch.device("meta"):
        return _as_loaded(family.build_hybrid(hybrid_config), base)


def _as_loaded(model: PreTrainedModel, base: Base) -> PreTrainedModel:
    """In the dtype that the recipe asks for; what the class keeps in fp32 stays there. Chunks as a run has them."""
    shorten_chunks(model)
    asked = model.config.dtype if base.dtype == "auto" else getattr(torch, base.dtype)
    kept = model._keep_in_fp32_modules_strict or ()
    for name, parameter in model.named_parameters():
        dtype = torch.float32 if name.rsplit(".", 1)[-1] in kept else asked or torch.float32
        parameter.data = parameter.data.to(dtype)
    return model


def _at_hand(base: Base, path: Path | None) -> tuple[Base, str]:
    """The base with its config from where no connection is needed, and a note if that is not its own place.

    A folder is itself. A Hub id is looked for in the local cache, then among the configs beside the recipe; the Hub is
    asked only if neither has it.
    """
    cached = _cached(base.model, "config.json", base.revision)
    if Path(base.model).exists() or cached is not None:
        return base.model_copy(update={"model": str(cached or base.model)}), ""
    owner, _, name = base.model.partition("/")
    kept = path.parent / "configs" / name if path is not None else None
    if kept is None or not name or "/" in name or owner.startswith((".", "~")) or not (kept / "config.json").is_file():
        return base, ""
    return base.model_copy(update={"model": str(kept)}), str(kept)


def _tokenizer(base: Base, may_ask: bool) -> tuple[PreTrainedTokenizerBase, str]:
    """The base's tokenizer, or the toolkit's small one, and a note which. `may_ask`: the Hub may be asked for it."""
    source = base.tokenizer or base.model
    cached = _cached(source, "tokenizer.json", None if base.tokenizer else base.revision)
    if cached is not None or Path(source).exists() or may_ask:
        try:
            there = base if cached is None else base.model_copy(update={"tokenizer": str(cached)})
            return load_tokenizer(there), "its own tokenizer"
        except ModelError:
            pass  # the counts do not need it, and the run itself refuses
    note = "the toolkit's small tokenizer (its own is not at hand): about 5 tokens a key-value pair"
    return build_tokenizer(), note


def _cached(source: str, name: str, revision: str | None) -> Path | None:
    """The folder in the Hub's cache that has this file; None too for what is a folder, or no id."""
    if Path(source).exists():
        return None
    try:
        found = try_to_load_from_cache(source, name, revision=revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _located(recipe: Recipe, folder: Path) -> HeadSet | None:
    """The heads of an earlier run, if they were located with these very settings."""
    manifest = RunDir(folder).manifest("locate")
    if manifest is None or not (folder / "heads.json").is_file():
        return None
    run = Run(recipe, folder, make_accelerator())
    fresh = manifest["key"] == STAGES[0].key(run)
    return head_set_from_json(read_json(folder / "heads.json")) if fresh else None
