"""Where to operate. Owns: the order of measurements, roles, and what a HeadSet is made from.

Must never know: files, splicing. The methods and what each costs: docs/LOCATE.md.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.encoding import EncodedBatch
from surgery.errors import ModelError, ProbeError, RecipeError
from surgery.interventions.ablation import Removal
from surgery.locate.ablation_sweep import READS, Sweep, Variant
from surgery.locate.batches import ROUNDING, Prompts
from surgery.locate.methods import REMOVALS, Item, columns_of, items_of, measure
from surgery.locate.redundancy import backups, pairs, together, without_over
from surgery.locate.scores import Array, Record, Table, plain, scores_of
from surgery.locate.search import rounds, survivors
from surgery.locate.selection import RANKED_BY, Candidate, better_read, choose, rank
from surgery.models.lookup import family_of, geometry_of
from surgery.recipe import Locate, Splice
from surgery.recipe.locate import NEEDS
from surgery.stats import bootstrap_mean, holm, mcnemar, wilson
from surgery.types import HeadSet, Interval, Role, ScoredGroup, ScoredHead

Progress = Callable[[int, int], None]
_LEVEL = 0.05  # family-wise, over both role tests of all heads


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
    """Measures every head on KV-retrieval and chooses those to splice.

    Under several processes (torch.distributed) each measures its share of the batches, and all return the same.

    Args:
        section: methods and prompts; `splice.select` and `splice.num_heads` say what is chosen, and by what.
        name, revision: what the HeadSet says it was measured on.
        progress: called with (done, all) after each step of this process's work.
        batches: other prompts, left-padded and ending at the query, in the place of the section's.
        any_accuracy: measure a base at chance or at ceiling too, where no head can be told from another.

    Raises:
        ProbeError: more pairs than values, or the base is at chance or at ceiling so that nothing can be measured.
        ModelError: an unknown model type, a tokenizer of another model, logits that are no numbers, or a hook that
            never fired.
        RunError: not enough memory.
        PlanError: what is asked for cannot be spliced.
    """
    section, splice = section or Locate(), splice or Splice()
    training, began = model.training, time.perf_counter()
    try:
        prompts = Prompts(model.eval(), tokenizer, section, seed, batches)
        found = _Locating(model, section, splice, seed, prompts, any_accuracy, progress).run()
    finally:
        model.train(training)
    cost = {"seconds": time.perf_counter() - began, **found.cost, "peak_bytes": peak_bytes()}
    return HeadSet(
        name, revision, geometry_of(model.config), found.ranked, found.chosen, splice.select, seed, found.clean,
        found.groups, cost,
    )  # fmt: skip


def peak_bytes() -> float:
    """The most memory that was in use: of the GPU if there is one, else of the process since it began."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


@dataclass(frozen=True)
class _Found:
    ranked: tuple[ScoredHead, ...]
    chosen: tuple[ScoredHead, ...]
    clean: dict[str, Interval]
    groups: tuple[ScoredGroup, ...]
    cost: dict[str, float]


class _Locating:
    """One call of `locate`."""

    def __init__(
        self,
        model: PreTrainedModel,
        section: Locate,
        splice: Splice,
        seed: int,
        prompts: Prompts,
        any_accuracy: bool,
        progress: Progress | None,
    ) -> None:
        self.model, self.section, self.splice, self.seed = model, section, splice, seed
        self.prompts, self.any_accuracy, self._progress = prompts, any_accuracy, progress
        needed = NEEDS.get(splice.select)
        if needed is not None and needed not in section.methods:
            raise RecipeError("splice.select", splice.select, f"It needs {needed} among locate.methods.")
        if section.fill != "zero" and min(map(len, prompts.batches)) < 2:
            raise ProbeError(
                "locate.fill", section.fill, "A batch has one prompt, and nothing to take from: resize them."
            )
        family = family_of(model.config)
        self.specs, self.sites = family.mixers(model.config), family.sites(model.config)
        self.items: list[Item] = items_of(self.specs, section.layers)
        self.heads = [head for spec in self.specs for head in spec.heads]
        self.done, self.steps = 0, self._count_steps()

    def _count_steps(self) -> int:
        """How often `tick` is called, if every batch is measured here."""
        given = self.splice.num_heads - 1 if self.splice.select == "sharpen" else 0
        methods = len(columns_of(self.section)) + len(set(self.section.methods) - REMOVALS)
        return len(self.prompts) * max(1, methods) + given + self.section.backups + (1 if self.section.backups else 0)

    def tick(self) -> None:
        self.done += 1
        if self._progress is not None:
            self._progress(min(self.done, self.steps), self.steps)

    def run(self) -> _Found:
        ranks = self.splice.select in RANKED_BY
        if ranks and not self.any_accuracy:
            check_clean(Table(self.prompts.clean()), self.section, self.prompts.chance)
        table, alive = self._measure()
        check_moved(table)
        scored, groups = self._score(table, alive)
        ranked = rank(scored, self.splice.select if ranks else self._default_ranking())
        chosen = choose(ranked, self.sites, self.splice, self.section, self.seed, self._gains)
        groups += self._groups(scored, chosen)
        n = len(table.clean_margin())
        clean = {
            "accuracy": wilson(int(table.clean_correct().sum()), n),
            "margin": bootstrap_mean(table.clean_margin()[None], self.seed)[0],
        }
        return _Found(ranked, chosen, clean, tuple(groups), {"prompts": float(n), "passes": self.prompts.passes})

    def _default_ranking(self) -> str:
        """For a choice that no score makes: by the first method that ranks."""
        measured = {"query": "aggregate", "context": "gather"}
        ranking = [measured.get(method, method) for method in self.section.methods]
        return "sharpen" if "sharpen" in ranking else next((m for m in ranking if m in RANKED_BY), "sharpen")

    def _measure(self) -> tuple[Table, list[int]]:
        """All prompts; with a search, in rounds, each over the heads that are left."""
        alive, batches = list(range(len(self.items))), self.prompts.batches
        records: list[Record] = []
        search = self.section.search
        plan = rounds(search.first, sum(map(len, batches))) if search else [sum(map(len, batches))]
        begin, seen = 0, 0
        for index, count in enumerate(plan):
            end = begin
            while end < len(batches) and seen < count:
                seen += len(batches[end])
                end += 1
            now = list(alive)

            def one(i: int, sweep: Sweep, now: list[int] = now) -> Record:
                text = (self.prompts.documents(i), self.prompts.tokenizer)
                return measure(sweep, i, self.items, now, self.section, *text, self.tick)

            records += self.prompts.map(one, range(begin, end))
            begin = end
            if search and index + 1 < len(plan):
                alive = self._still(Table(records), alive, search.risk, len(plan) - 1)
        return Table(records), alive

    def _still(self, table: Table, alive: list[int], risk: float, num_rounds: int) -> list[int]:
        """The heads that may still be among the best by the column that chooses; layers stay."""
        method = self.splice.select if self.splice.select in RANKED_BY else self._default_ranking()
        names = {"sharpen": READS, "aggregate": ("query",), "gather": ("context",)}.get(method, (method,))
        sign = 1 if method == "sharpen" else -1
        heads = [i for i in alive if i < len(self.heads)]
        arms = [
            table.estimate(c) if c in table.estimates else sign * (table.margin(c) - table.clean_margin())
            for c in names
        ]
        several = self.splice.num_heads > 1 or self.section.backups > 0
        keep = max(self.splice.num_heads, self.section.top_k if several else 1)
        sites = {spec.name for spec in self.sites}
        left = [i for i in alive if i >= len(self.heads)]
        for spliced in (True, False):  # what cannot be spliced must not push out what can
            kind = [i for i in heads if (self.heads[i].mixer in sites) == spliced]
            left += survivors([arm[: len(self.heads)] for arm in arms], kind, keep, risk, num_rounds)
        return sorted(left)

    def _score(self, table: Table, alive: list[int]) -> tuple[tuple[ScoredHead, ...], list[ScoredGroup]]:
        """Intervals for every head and column, its role by position, and the better column to read; layers too."""
        scores = scores_of(table, dict.fromkeys(READS, 1), self.seed)
        by_item = [
            {name: column[i] for name, column in scores.items() if column[i].n > 0} for i in range(len(self.items))
        ]
        roles = roles_of(table, alive, len(self.heads))
        heads = [ScoredHead(head, roles[i], better_read(by_item[i]), by_item[i]) for i, head in enumerate(self.heads)]
        layers = [ScoredGroup("layer", self.items[i], by_item[i]) for i in range(len(self.heads), len(self.items))]
        return tuple(heads), layers

    def _gains(self, options: Sequence[Candidate], taken: Sequence[Candidate]) -> Array:
        """(options,N): what each perfect read adds to those already there."""
        variants = [Variant(sharpen=tuple(taken)), *(Variant(sharpen=(*taken, option)) for option in options)]

        def one(_: int, sweep: Sweep) -> Array:
            return np.stack([plain(scores)[0] for scores in sweep.at_query(variants)])

        margins = np.concatenate(self.prompts.map(one), axis=1)
        self.tick()
        return margins[1:] - margins[0]

    def _groups(self, scored: Sequence[ScoredHead], chosen: Sequence[ScoredHead]) -> list[ScoredGroup]:
        """Backups, pairs, and all chosen heads off."""
        if not self.section.backups:
            return []
        without = without_over(self.prompts.map, Removal(self.section.where, self.section.fill))
        whole = [s for s in scored if s.n == max(x.n for x in scored)]
        ranked = rank(whole, "ablation")
        found = backups(ranked, self.section.backups, self.section.top_k, without, self.seed, self.tick)
        if {"query", "context"} <= set(self.section.methods):
            found += pairs(whole, min(self.section.backups, 4), without, self.seed, self.tick)
        return found + ([together([s.head for s in chosen], without, self.seed)] if chosen else [])


def check_clean(table: Table, section: Locate, chance: float) -> None:
    """Raises ProbeError where the base is at chance or at ceiling."""
    right = table.clean_correct()
    accuracy = wilson(int(right.sum()), len(right))
    value = f"{section.pairs} (clean accuracy {accuracy.value:.2f})"
    if accuracy.low <= chance:
        raise ProbeError(
            "locate.pairs", value, "The base is at chance, so no head can be told from another: try fewer."
        )
    if accuracy.value > 0.99:
        raise ProbeError(
            "locate.pairs", value, "The base is at ceiling, so no head can be told from another: try more."
        )


def check_moved(table: Table) -> None:
    """Raises ModelError where removing heads changed nothing at all."""
    measured = [column for column in ("query", "ablation", "context") if column in table.columns]
    if not measured:
        return
    moved = np.nanmax(np.abs(table.margin(measured[0]) - table.clean_margin()))
    if float(moved) < ROUNDING:
        hint = "Removing heads moves no logit: they are all zero, or a kernel bypasses the hooks."
        raise ModelError("locate", f"ablation at {measured[0]}", hint)


def roles_of(table: Table, alive: Sequence[int], heads: int) -> list[Role]:
    """Gather heads work on the context, Aggregate heads at the query.

    By exact McNemar tests on the answers that a removal loses, one for each head and position, all Holm-corrected
    together: the chance of calling any head of a model that does not retrieve is at most 0.05. Heads that a search
    dropped count among the tests, and are not called; nor are positions that were not measured.
    """
    right, tested = table.clean_correct(), {i for i in alive if i < heads}
    kinds = {"context": "gather", "query": "aggregate"}
    asked = [(kind, i, column) for column, kind in kinds.items() if column in table.columns for i in range(heads)]
    p_values = [mcnemar(right, table.correct(column)[i] > 0) if i in tested else 1.0 for _, i, column in asked]
    called = {(kind, i) for (kind, i, _), passed in zip(asked, holm(p_values, _LEVEL), strict=True) if passed}
    if not asked:
        return ["unmeasured"] * heads
    return [
        _role(("gather", i) in called, ("aggregate", i) in called) if i in tested else "unmeasured"
        for i in range(heads)
    ]


def _role(gathers: bool, aggregates: bool) -> Role:
    if gathers and aggregates:
        return "both"
    return "gather" if gathers else "aggregate" if aggregates else "neither"
