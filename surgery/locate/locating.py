"""Measure every head and choose the heads to splice. docs/LOCATE.md describes the methods and their cost."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.encoding import EncodedBatch
from surgery.errors import ModelError, ProbeError, RecipeError
from surgery.locate.ablation_sweep import Variant, change_at_query
from surgery.locate.batches import ROUNDING, PromptBatches
from surgery.locate.measuring import items_of, measure_heads
from surgery.locate.memory import locate_memory
from surgery.locate.scores import Array, Table, plain, roles_of, scores_of
from surgery.locate.selection import Candidate, choose, rank, ranking_of
from surgery.models.config_checks import check_unquantized
from surgery.models.lookup import family_of, geometry_of
from surgery.models.runtime import evaluating
from surgery.models.torch_scans import torch_scans
from surgery.recipe import Locate, Splice
from surgery.recipe.methods import METHODS, RANKINGS, is_greedy
from surgery.stats import bootstrap_mean, wilson
from surgery.types import HeadSet, Interval, MixerSpec, ScoredGroup, ScoredHead, better_read

Progress = Callable[[int, int], None]

_FIRST = 32  # prompts that are answered before anything is measured
_FEW_PAIRS = 4  # fewer would not help: with 2 pairs, every second guess is right
_WAYS_ON = (
    "It cannot retrieve even from so few pairs. Set locate.task to a text that it answers (`surgery init` tries six), "
    "choose heads without measuring them (splice.select: random), or train a base that retrieves first "
    "(docs/your-model.md)."
)


def locate_heads(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    section: Locate | None = None,
    splice: Splice | None = None,
    seed: int = 0,
    name: str = "model",
    revision: str = "",
    progress: Progress | None = None,
    batches: Sequence[EncodedBatch] | None = None,
    any_accuracy: bool = False,
    note: Callable[[str], None] | None = None,
) -> HeadSet:
    """Measure every head on retrieval prompts and choose the heads to splice.

    With several processes (torch.distributed), each measures its share of the batches, and all return the same result.

    Args:
        model: the base.
        tokenizer: the model's.
        section: the recipe's section `locate`: methods and prompts. Its defaults if None.
        splice: the recipe's section `splice`. `select` and `num_heads` choose the heads.
        seed: of the prompts and the bootstrap.
        name: name of the model in the HeadSet.
        revision: revision of the model in the HeadSet.
        progress: called with (done, total) after each step of this process.
        batches: prompts to use instead of the section's. Left-padded, ending at the query.
        any_accuracy: measure a base at chance too. Its heads cannot be distinguished.
        note: called with one line on the memory, before anything is measured.

    Returns:
        Every head with its scores, best first, and the chosen heads.

    Raises:
        ProbeError: more pairs than values, or the base is at chance.
        DataError: `section.data` cannot be read, or has no row with a place of the answer.
        ModelError: an unknown model type, quantized weights, a tokenizer of another model, logits that are NaN, or a
            hook that never fired.
        RunError: out of memory.
        RecipeError: a method of the section does not fit the other settings.
        PlanError: the heads to choose cannot be spliced.
    """
    section, splice = section or Locate(), splice or Splice()
    began = time.perf_counter()
    check_unquantized(model.config)
    family = family_of(model.config)
    specs, sites = family.mixers(model.config), family.sites(model.config)
    with evaluating(model), torch_scans(model):
        prompts = PromptBatches(model, tokenizer, section, seed, batches)
        _check_request(section, splice, prompts)
        if note is not None:
            note(str(locate_memory(prompts)))
        tick = _ticker(section, splice, len(prompts), progress)
        checks = splice.select in RANKINGS and not any_accuracy
        if checks:  # early, and on a few prompts if these show no fault
            try:
                check_clean(Table(prompts.clean(_FIRST)), section, prompts.chance)
            except ProbeError:
                check_clean(Table(prompts.clean()), section, prompts.chance)
        table = measure_heads(prompts, specs, tick)
        if checks:
            check_clean(table, section, prompts.chance)
        check_moved(table, splice.select)
        heads, groups = _scored(table, specs, section.layers, seed)
        ranked = rank(heads, ranking_of(splice, section))
        chosen = choose(ranked, sites, splice, section, seed, partial(measure_gains, prompts, tick))
    clean = {"accuracy": accuracy_of(table), "margin": bootstrap_mean(table.clean[:1], seed)[0]}
    seconds = time.perf_counter() - began
    cost = {"seconds": seconds, "prompts": float(clean["accuracy"].n), "passes": prompts.passes}
    cost["peak_bytes"] = peak_bytes(model.device)
    geometry = geometry_of(model.config)
    return HeadSet(name, revision, geometry, ranked, chosen, splice.select, seed, clean, tuple(groups), cost)


def _check_request(section: Locate, splice: Splice, prompts: PromptBatches) -> None:
    """Raise an error if these settings cannot be measured."""
    needed = RANKINGS[splice.select].name if splice.select in RANKINGS else None
    if needed is not None and needed not in section.methods:
        raise RecipeError("splice.select", splice.select, f"Add {needed} to locate.methods.")
    if section.fill != "zero" and min(map(len, prompts.batches)) < 2:
        hint = "A batch has a single prompt, so there is no other prompt to take values from. "
        hint += "Change locate.batch_size or locate.examples."
        raise ProbeError("locate.fill", section.fill, hint)
    if "patching" in section.methods and prompts.counterfactual(0) is None:
        hint = "It needs prompts with different answers, each with its place in the prompt. Remove the method."
        raise ProbeError("locate.methods", "patching", hint)
    for method in section.methods:
        if METHODS[method].needs_text and prompts.documents(0) is None:
            hint = "It reads the text of the prompts, which encoded batches lack. Remove it, or do not pass `batches`."
            raise ProbeError("locate.methods", method, hint)


def _ticker(section: Locate, splice: Splice, batches: int, progress: Progress | None) -> Callable[[], None]:
    """Count the steps of this process for `progress`. The total is that of a process that measures every batch."""
    methods = [METHODS[method] for method in section.methods]
    per_batch = sum(len(method.columns) if method.changes_heads else 1 for method in methods)
    further = splice.num_heads - 1 if is_greedy(splice.select) else 0
    steps = batches * max(1, per_batch) + further
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(min(done, steps), steps)

    return tick


def peak_bytes(device: torch.device) -> float:
    """Peak memory in bytes since the process started: of a GPU, otherwise of the process."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def _scored(
    table: Table, specs: Sequence[MixerSpec], layers: bool, seed: int
) -> tuple[list[ScoredHead], list[ScoredGroup]]:
    """Score every head: intervals by column, its role and its better oracle read. Then every layer."""
    items, heads = items_of(specs, layers), items_of(specs, False)
    scores = scores_of(table, seed)
    by_item = [{name: column[i] for name, column in scores.items() if column[i].n > 0} for i in range(len(items))]
    roles = roles_of(table, len(heads))
    scored = [
        ScoredHead(head, roles[i], better_read({k: x.value for k, x in by_item[i].items()}), by_item[i])
        for i, (head,) in enumerate(heads)
    ]
    groups = [ScoredGroup("layer", items[i], by_item[i]) for i in range(len(heads), len(items))]
    return scored, groups


def measure_gains(
    prompts: PromptBatches, tick: Callable[[], None], options: Sequence[Candidate], taken: Sequence[Candidate]
) -> Array:
    """(options,N) margins in logits that each oracle read gains in addition to those of `taken`."""
    variants = [Variant(oracle=tuple(taken)), *(Variant(oracle=(*taken, option)) for option in options)]
    with prompts.gathered() as batches:
        for index, run in prompts.clean_runs():
            batches[index] = np.stack([plain(scores)[0] for scores in change_at_query(run, variants)])
            del run  # frees its activations before the next batch runs
    margins = np.concatenate(list(batches.values()), axis=1)
    tick()
    return margins[1:] - margins[0]


def accuracy_of(table: Table) -> Interval:
    """Accuracy of the clean model."""
    right = table.clean[1]
    return wilson(int(right.sum()), len(right))


def check_clean(table: Table, section: Locate, chance: float) -> None:
    """Raise ProbeError if the base is at chance."""
    accuracy = accuracy_of(table)
    if accuracy.low > chance:
        return
    field, what = "locate.pairs", str(section.pairs)
    fewer = "Set fewer pairs, or run `surgery init MODEL`, which tries formats and numbers of pairs."
    easier = fewer if section.pairs > _FEW_PAIRS else _WAYS_ON
    if section.data is not None:
        field, what, easier = "locate.data", section.data.path, "Use questions that it answers."
    value = f"{what} (clean accuracy {accuracy.value:.2f} of {accuracy.n} prompts)"
    raise ProbeError(field, value, f"The base is at chance, so all heads look alike. {easier}")


def check_moved(table: Table, select: str) -> None:
    """Raise ModelError if ablating heads changed no margin, or patching if it is to choose heads."""
    columns = [name for name in table.columns if name in ("query", "ablation", "context")][:1]
    for column in [*columns, "patching"] if select == "patching" else columns:
        if float(np.nanmax(np.abs(table.effect(column)))) < ROUNDING:
            hint = "Ablating heads changes no logit: their outputs are all zero, or a kernel bypasses the hooks."
            if column == "patching":
                hint = "No head's output at the query depends on the answer in the prompt. Set splice.select: random."
            raise ModelError("locate", f"the column {column}", hint)
