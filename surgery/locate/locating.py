"""Measure every head and choose the heads to splice. docs/LOCATE.md describes the methods and their cost."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import distributed
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.encoding import EncodedBatch
from surgery.errors import ModelError, PlanError, ProbeError, RecipeError, fitting
from surgery.interventions.ablation import Ablation
from surgery.locate.ablation_sweep import Variant, change_at_query
from surgery.locate.batches import ROUNDING, PromptBatches
from surgery.locate.clean_run import CleanRun
from surgery.locate.methods import Candidates, LocateBatch, TrainedScores
from surgery.locate.redundancy import ablate_in_turn, ablate_pairs, ablate_sets, ablate_together
from surgery.locate.scores import Array, Record, Table, plain, roles_of, scores_of, spread
from surgery.locate.selection import (
    CANDIDATES_BY,
    Candidate,
    choose,
    rank,
    ranking_of,
    search_rounds,
    still_candidates,
)
from surgery.models.lookup import family_of, geometry_of
from surgery.recipe import Locate, Splice
from surgery.recipe.methods import METHODS, RANKINGS, Method, is_greedy
from surgery.registry import plugin_errors
from surgery.scoring.ranking import ChoiceScores
from surgery.stats import bootstrap_mean, wilson
from surgery.types import HeadId, HeadSet, Interval, MixerSpec, ScoredGroup, ScoredHead, better_read

Progress = Callable[[int, int], None]
Item = tuple[HeadId, ...]  # heads that are changed together


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
) -> HeadSet:
    """Measure every head on KV-retrieval prompts and choose the heads to splice.

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
        any_accuracy: measure a base at chance or at ceiling too. Its heads cannot be distinguished.

    Returns:
        Every head with its scores, best first, and the chosen heads.

    Raises:
        ProbeError: more pairs than values, or the base is at chance or at ceiling.
        ModelError: an unknown model type, a tokenizer of another model, logits that are NaN, or a hook that never
            fired.
        RunError: out of memory.
        PlanError: the heads to choose cannot be spliced.
    """
    section, splice = section or Locate(), splice or Splice()
    training, began = model.training, time.perf_counter()
    family = family_of(model.config)
    specs, sites = family.mixers(model.config), family.sites(model.config)
    try:
        prompts = PromptBatches(model.eval(), tokenizer, section, seed, batches)
        _check_request(section, splice, prompts)
        tick = _ticker(section, splice, len(prompts), sum(spec.num_heads for spec in sites), progress)
        if splice.select in RANKINGS and not any_accuracy:
            check_clean(Table(prompts.clean()), section, prompts.chance)
        table, alive = measure_heads(prompts, specs, sites, splice, tick)
        check_moved(table)
        heads, groups = _scored(table, alive, specs, section.layers, seed)
        trained, trained_cost = train_candidates(prompts, heads, sites, splice, seed, tick)
        heads = _with_trained_scores(heads, trained, seed)
        ranked = rank(heads, ranking_of(splice, section))
        method = RANKINGS[splice.select].name if splice.select in RANKINGS else ""
        together = trained[method].chosen if method in trained else ()
        scores = {scored.head: scored.scores for scored in heads}
        chosen = tuple(replace(s, scores=scores[s.head]) for s in together)
        chosen = chosen or choose(ranked, sites, splice, section, seed, partial(measure_gains, prompts, tick))
        groups += _redundancy(prompts, heads, chosen, seed, tick)
    finally:
        model.train(training)
    right, margin = table.clean_correct(), table.clean_margin()
    accuracy = wilson(int(right.sum()), len(right))
    clean = {"accuracy": accuracy, "margin": bootstrap_mean(margin[None], seed)[0]}
    seconds = time.perf_counter() - began
    cost = {"seconds": seconds, "prompts": float(len(right)), "passes": prompts.passes, "peak_bytes": peak_bytes()}
    cost |= trained_cost
    geometry = geometry_of(model.config)
    return HeadSet(name, revision, geometry, ranked, chosen, splice.select, seed, clean, tuple(groups), cost)


def _check_request(section: Locate, splice: Splice, prompts: PromptBatches) -> None:
    """Raise an error if these settings cannot be measured."""
    needed = RANKINGS[splice.select].name if splice.select in RANKINGS else None
    if needed is not None and needed not in section.methods:
        raise RecipeError("splice.select", splice.select, f"Add {needed} to locate.methods.")
    if needed is not None and METHODS[needed].trains and splice.num_heads > section.candidates_of(needed):
        hint = f"Set locate.{needed}.candidates to {splice.num_heads} or more."
        raise PlanError("splice.num_heads", splice.num_heads, hint)
    for method in section.trained:
        if splice.teacher is not None:
            raise RecipeError("locate.methods", method, "It cannot train copies of a teacher. Choose another method.")
        if METHODS[CANDIDATES_BY].name not in section.methods:
            raise RecipeError(
                "locate.methods", method, f"It needs {CANDIDATES_BY}, which chooses the candidates. Add it."
            )
    if section.fill != "zero" and min(map(len, prompts.batches)) < 2:
        hint = "A batch has a single prompt, so there is no other prompt to take values from. "
        hint += "Change locate.batch_size or locate.examples."
        raise ProbeError("locate.fill", section.fill, hint)
    for method in section.methods:
        if METHODS[method].needs_text and prompts.documents(0) is None:
            hint = "It reads the text of the prompts, which encoded batches lack. Remove it, or do not pass `batches`."
            raise ProbeError("locate.methods", method, hint)


def _ticker(
    section: Locate, splice: Splice, batches: int, num_heads: int, progress: Progress | None
) -> Callable[[], None]:
    """Count the steps of this process for `progress`. The total is that of a process that measures every batch.

    Args:
        num_heads: number of heads that can be spliced.
    """
    methods = [METHODS[method] for method in section.per_batch]
    per_batch = sum(len(method.columns) if method.changes_heads else 1 for method in methods)
    further = splice.num_heads - 1 if is_greedy(splice.select) else 0
    steps = batches * max(1, per_batch) + further + section.backups + (1 if section.backups else 0)
    steps += sum(section.training_steps(method, num_heads, splice.num_heads) for method in section.trained)
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(min(done, steps), steps)

    return tick


def peak_bytes() -> float:
    """Peak memory in bytes: of the GPU if there is one, otherwise of the process since it started."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def items_of(specs: Sequence[MixerSpec], layers: bool) -> list[Item]:
    """List the items to measure: every single head and, with `layers`, every mixer as a whole."""
    heads: list[Item] = [(head,) for spec in specs for head in spec.heads]
    return heads + ([spec.heads for spec in specs] if layers else [])


def measure_heads(
    prompts: PromptBatches,
    specs: Sequence[MixerSpec],
    sites: Sequence[MixerSpec],
    splice: Splice,
    tick: Callable[[], None],
) -> tuple[Table, list[int]]:
    """Measure all items on all prompts. A search measures in rounds and drops heads between them.

    Args:
        specs: all mixers.
        sites: the mixers that can be spliced.

    Returns:
        The scores, and the items that were measured on all prompts.
    """
    section = prompts.section
    items = items_of(specs, section.layers)
    heads = [head for spec in specs for head in spec.heads]
    sizes = [len(batch) for batch in prompts.batches]
    rounds = search_rounds(section.search.first, sum(sizes)) if section.search else [sum(sizes)]
    alive, begin = list(range(len(items))), 0
    records: list[Record] = []
    for number, count in enumerate(rounds, start=1):
        end = begin
        while end < len(sizes) and sum(sizes[:end]) < count:
            end += 1
        with prompts.gathered() as measured:
            for index, run in prompts.clean_runs(range(begin, end)):
                documents = prompts.documents(index)
                batch = LocateBatch(run, [items[i] for i in alive], section, prompts.tokenizer, documents)
                measured[index] = measure_batch(batch, index, alive, len(items), tick)
        records += measured.values()
        begin = end
        if number < len(rounds):
            alive = still_candidates(Table(records), alive, heads, sites, section, splice, len(rounds) - 1)
    return Table(records), alive


def measure_batch(
    batch: LocateBatch, index: int, alive: Sequence[int], num_items: int, tick: Callable[[], None]
) -> Record:
    """Run every method of the recipe on one batch.

    Args:
        index: index of the batch.
        alive: indices of the batch's items among all items. The other items get NaN.
        num_items: number of all items.
        tick: called after each column, or after each method that scores all heads at once.
    """
    run = batch.run
    record = Record(index, plain(run.scores))
    shares = [1 - spec.layer / run.model.config.num_hidden_layers for spec in run.specs]
    for method in (METHODS[name] for name in batch.section.per_batch):
        with plugin_errors(f"locating method {method.name}", method):
            scores = method.measure(batch)
        names = [column.name for column in method.columns]
        if not isinstance(scores, Mapping):
            hint = f"Return a dict with the columns {', '.join(names)}."
            raise ModelError("locate.methods", f"{method.name} returned {type(scores).__name__}", hint)
        if set(scores) != set(names):
            hint = f"It was registered with the columns {', '.join(names)}. Return exactly these."
            raise ModelError("locate.methods", f"{method.name} returned {', '.join(scores) or 'nothing'}", hint)
        for column in method.columns:
            if column.effect is not None:
                changed = scores[column.name]
                if len(changed) != len(batch.items) or not all(isinstance(x, ChoiceScores) for x in changed):
                    hint = (
                        f"A column with an effect is a list of {len(batch.items)} `ChoiceScores`, as of `batch.items`."
                    )
                    raise ModelError("locate.methods", f"{method.name} returned something else", hint)
                values = [plain(scored) for scored in changed]
                record.columns[column.name] = spread(values, alive, num_items)
                tick()
            else:
                record.estimates[column.name] = _estimate(method, scores[column.name], run, num_items)
        run.passes += (method.passes + method.passes_per_mixer * sum(shares)) * len(run.batch)
        if not method.changes_heads:
            tick()
    return record


def _estimate(method: Method, values: object, run: CleanRun, num_items: int) -> Array:
    """(C,B) estimates of all items from those of the heads, (heads,B). Layers get NaN."""
    heads, B = sum(spec.num_heads for spec in run.specs), len(run.batch)
    array = torch.as_tensor(values).detach().double().cpu().numpy()
    if array.shape != (heads, B):
        hint = f"Return one number for each head and prompt: shape ({heads}, {B})."
        raise ModelError("locate.methods", f"{method.name} returned shape {array.shape}", hint)
    whole = np.full((num_items, B), np.nan)
    whole[:heads] = array
    return whole


def train_candidates(
    prompts: PromptBatches,
    heads: Sequence[ScoredHead],
    sites: Sequence[MixerSpec],
    splice: Splice,
    seed: int,
    tick: Callable[[], None],
) -> tuple[dict[str, TrainedScores], dict[str, float]]:
    """Run the methods that train candidates: the heads with the best oracle reads among those that can be spliced.

    Every process does the same work, and takes the result of the first one.

    Args:
        heads: with the scores of the other methods.
        sites: the mixers that can be spliced.

    Returns:
        Scores by method, and entries for the cost: seconds, passes and steps of each method.

    Raises:
        PlanError: nothing can be spliced into this model.
    """
    section, trained, cost = prompts.section, {}, {}
    mixers = {spec.name for spec in sites}
    for method in (METHODS[name] for name in section.trained):
        began, count = time.perf_counter(), section.candidates_of(method.name)
        ranked = [s for s in rank(heads, CANDIDATES_BY) if s.head.mixer in mixers]
        if not ranked:
            hint = "It splices heads to try them, and no head of this model can be spliced. Remove it."
            raise PlanError("locate.methods", method.name, hint)
        held_out = sum(map(len, prompts.batches))
        candidates = Candidates(
            prompts.model, prompts.tokenizer, tuple(ranked[:count]), section, splice, seed, held_out, tick
        )
        hint = f"Lower it, or lower locate.{method.name}.rows."
        with (
            fitting(f"locate.{method.name}.candidates", count, hint),
            plugin_errors(f"locating method {method.name}", method),
        ):
            result = method.measure(candidates)
        names = [column.name for column in method.columns]
        if not isinstance(result, TrainedScores) or set(result.columns) != set(names):
            hint = f"Return `TrainedScores` with the columns {', '.join(names)}."
            raise ModelError("locate.methods", f"{method.name} returned something else", hint)
        if distributed.is_available() and distributed.is_initialized():
            shared = [result]
            distributed.broadcast_object_list(shared)
            result = shared[0]
        prompts.passes += result.passes
        trained[method.name] = result
        cost[f"{method.name}_seconds"] = time.perf_counter() - began
        cost[f"{method.name}_passes"], cost[f"{method.name}_steps"] = result.passes, float(result.steps)
    return trained, cost


def _with_trained_scores(
    heads: Sequence[ScoredHead], trained: Mapping[str, TrainedScores], seed: int
) -> list[ScoredHead]:
    """Add the scores of the methods that train to the heads that they tried."""
    added: dict[HeadId, dict[str, Interval]] = {scored.head: {} for scored in heads}
    for result in trained.values():
        for column, by_head in result.columns.items():
            if not by_head:
                continue
            for head, interval in zip(by_head, bootstrap_mean(np.stack(list(by_head.values())), seed), strict=True):
                added[head][column] = interval
    return [replace(scored, scores={**scored.scores, **added[scored.head]}) for scored in heads]


def _scored(
    table: Table, alive: Sequence[int], specs: Sequence[MixerSpec], layers: bool, seed: int
) -> tuple[list[ScoredHead], list[ScoredGroup]]:
    """Score every head: intervals by column, its role and its better oracle read. Then every layer."""
    items, heads = items_of(specs, layers), items_of(specs, False)
    scores = scores_of(table, seed)
    by_item = [{name: column[i] for name, column in scores.items() if column[i].n > 0} for i in range(len(items))]
    roles = roles_of(table, alive, len(heads))
    scored = [
        ScoredHead(head, roles[i], better_read({k: x.value for k, x in by_item[i].items()}), by_item[i])
        for i, (head,) in enumerate(heads)
    ]
    groups = [ScoredGroup("layer", items[i], by_item[i]) for i in range(len(heads), len(items))]
    return scored, groups


def measure_gains(
    prompts: PromptBatches, tick: Callable[[], None], options: Sequence[Candidate], taken: Sequence[Candidate]
) -> Array:
    """Measure the margin that each oracle read gains in addition to those already made.

    Args:
        options: oracle reads to measure.
        taken: oracle reads that are made in every run.

    Returns:
        (options,N) gains in logits.
    """
    variants = [Variant(oracle=tuple(taken)), *(Variant(oracle=(*taken, option)) for option in options)]
    with prompts.gathered() as batches:
        for index, run in prompts.clean_runs():
            batches[index] = np.stack([plain(scores)[0] for scores in change_at_query(run, variants)])
    margins = np.concatenate(list(batches.values()), axis=1)
    tick()
    return margins[1:] - margins[0]


def _redundancy(
    prompts: PromptBatches,
    heads: Sequence[ScoredHead],
    chosen: Sequence[ScoredHead],
    seed: int,
    tick: Callable[[], None],
) -> list[ScoredGroup]:
    """Ablate heads in turn, in pairs, and all chosen heads together, if the recipe sets `backups`."""
    section = prompts.section
    if not section.backups:
        return []
    ablation = Ablation(section.where, section.fill)
    most = max(s.n for s in heads)
    measured = [s for s in heads if s.n == most]
    sets = partial(ablate_sets, prompts, ablation)
    groups = ablate_in_turn(rank(measured, "ablation"), section.backups, section.top_k, sets, seed, tick)
    if {"query", "context"} <= set(section.methods):
        groups += ablate_pairs(measured, min(section.backups, 4), sets, seed, tick)
    return groups + ([ablate_together([s.head for s in chosen], sets, seed)] if chosen else [])


def check_clean(table: Table, section: Locate, chance: float) -> None:
    """Raise ProbeError if the base is at chance or at ceiling."""
    right = table.clean_correct()
    accuracy = wilson(int(right.sum()), len(right))
    value = f"{section.pairs} (clean accuracy {accuracy.value:.2f})"
    if accuracy.low <= chance:
        raise ProbeError("locate.pairs", value, "The base is at chance, so all heads look alike. Set fewer pairs.")
    if accuracy.value > 0.99:
        raise ProbeError("locate.pairs", value, "The base is at ceiling, so all heads look alike. Set more pairs.")


def check_moved(table: Table) -> None:
    """Raise ModelError if ablating heads changed no margin."""
    measured = [column for column in ("query", "ablation", "context") if column in table.columns]
    if not measured:
        return
    moved = np.nanmax(np.abs(table.margin(measured[0]) - table.clean_margin()))
    if float(moved) < ROUNDING:
        hint = "Ablating heads changes no logit: their outputs are all zero, or a kernel bypasses the hooks."
        raise ModelError("locate", f"ablation at {measured[0]}", hint)
