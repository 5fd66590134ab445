"""Where to operate. Owns: the order of measurements, the columns, roles and the choice of heads.

Must never know: files, splicing. The methods and their cost: METHOD 2, docs/ARCHITECTURE.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import ModelError, PlanError, ProbeError
from surgery.evaluate.scoring import ChoiceScores
from surgery.families import family_of, geometry_of
from surgery.heads import HeadId, HeadSet, Interval, MixerSpec, Reads, Role, ScoredHead
from surgery.locate.statistics import bootstrap_mean, holm, mcnemar, wilson
from surgery.locate.sweep import READS, Sweep, Variant
from surgery.probes.documents import encode, rng_of
from surgery.probes.kv_retrieval import kv_document
from surgery.recipe import Locate, Splice

# Margin in logits that the model loses, or gains, when ...
COLUMNS = {
    "ablation": "the head is removed at every token",
    "query": "the head is removed at the query token alone",
    "context": "the head is removed at every token but the query",
    "segment_end": "the head reads the end of the gold segment perfectly, at the query",
    "answer_token": "the head reads the gold value perfectly, at the query",
}
Progress = Callable[[int, int], None]
_ROUNDING = 1e-3  # logits; what two exact computations of one margin may differ by


@dataclass
class _Table:
    """Margins and right answers by prompt: `clean` (N,), the columns (heads, N)."""

    clean: list[ChoiceScores] = field(default_factory=list)
    columns: dict[str, list[list[ChoiceScores]]] = field(default_factory=dict)

    def add(self, column: str, scores: list[ChoiceScores]) -> None:
        self.columns.setdefault(column, []).append(scores)

    def margin(self, column: str | None) -> NDArray[np.float64]:
        return self._stack(column, "margin").astype(np.float64)

    def correct(self, column: str | None) -> NDArray[np.bool_]:
        return self._stack(column, "correct").astype(np.bool_)

    def _stack(self, column: str | None, name: str) -> NDArray:
        def joined(batches: Sequence[ChoiceScores]) -> NDArray:
            return torch.cat([getattr(b, name) for b in batches]).cpu().numpy()

        if column is None:
            return joined(self.clean)
        return np.stack([joined(batches) for batches in zip(*self.columns[column], strict=True)])


def locate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    section: Locate | None = None,
    splice: Splice | None = None,
    seed: int = 0,
    name: str = "model",
    revision: str = "",
    progress: Progress | None = None,
) -> HeadSet:
    """Measures every head on KV-retrieval and chooses those to splice.

    Args:
        section: prompts; `splice.select` and `splice.num_heads` say what is chosen, and by what.
        name, revision: what the HeadSet says it was measured on.
        progress: called with (done, all) after each step of work.

    Raises:
        ProbeError: more pairs than values, or the base is at chance or at ceiling so that nothing can be measured.
        ModelError: an unknown model type, or a hook that never fired.
    """
    section, splice = section or Locate(), splice or Splice()
    training = model.training
    try:
        return _locate(model.eval(), tokenizer, section, splice, seed, name, revision, progress)
    finally:
        model.train(training)


def _locate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    section: Locate,
    splice: Splice,
    seed: int,
    name: str,
    revision: str,
    progress: Progress | None,
) -> HeadSet:
    layers = family_of(model.config).mixers(model.config)
    heads = [head for spec in layers for head in spec.heads]
    sweeps = _Sweeps(model, tokenizer, section, seed)
    given = splice.num_heads - 1 if splice.select == "sharpen" else 0
    everywhere = () if section.at == "query" else ("ablation", "context")
    steps, done = len(sweeps) * (len(everywhere) * len(layers) + 2) + given, 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, steps)

    table = _measure(sweeps, heads, everywhere, tick)
    if splice.select in _RANKED_BY:
        _check_clean(table, section)
    _check_moved(table)
    scored = _score(heads, table, seed)
    ranked = rank(scored, splice.select if splice.select in _RANKED_BY else "sharpen")
    sites = family_of(model.config).sites(model.config)
    chosen = _choose(ranked, sites, splice, section, sweeps, seed, tick)
    n = len(table.margin(None))
    clean = {
        "accuracy": wilson(int(table.correct(None).sum()), n),
        "margin": bootstrap_mean(table.margin(None)[None], seed)[0],
    }
    return HeadSet(name, revision, geometry_of(model.config), ranked, chosen, splice.select, seed, clean)


def _measure(
    sweeps: Iterable[Sweep], heads: Sequence[HeadId], everywhere: Sequence[str], tick: Callable[[], None]
) -> _Table:
    """The columns `everywhere`, and those at the query, batch by batch."""
    table = _Table()
    for sweep in sweeps:
        table.clean.append(sweep.clean)
        for column in everywhere:
            scores = []
            for spec in sweep.specs:
                scores += sweep.ablated(spec, context_only=column == "context")
                tick()
            table.add(column, scores)
        table.add("query", sweep.at_query([Variant(ablate=(h,)) for h in heads]))
        tick()
        for reads in READS:
            table.add(reads, sweep.at_query([Variant(sharpen=((h, reads),)) for h in heads]))
        tick()
    return table


class _Sweeps:
    """The clean passes over all prompts, one batch in memory at a time; prompts are made of evaluation words."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, section: Locate, seed: int) -> None:
        n, size = section.examples, section.batch_size
        documents = [kv_document(rng_of("locate", seed, i), section.pairs, split="eval") for i in range(n)]
        chunks = [documents[i : i + size] for i in range(0, n, size)]
        self._batches = [encode(c, tokenizer, padding_side="left", until_answer=True) for c in chunks]
        self._model = model

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Sweep]:
        for index, batch in enumerate(self._batches):
            sweep = Sweep(self._model, batch.to(self._model.device))
            if index == 0:
                self._check_decode(sweep)
            yield sweep

    def _check_decode(self, sweep: Sweep) -> None:
        """Measuring at the query needs a cached step that is the forward pass."""
        clean = sweep.clean.margin
        apart = float((sweep.at_query([Variant()])[0].margin - clean).abs().max())
        if self._model.dtype == torch.float32 and apart > _ROUNDING * max(1.0, float(clean.abs().max())):
            hint = "Its cached decode step is not its forward pass (a finite time_step_limit does that)."
            raise ModelError("locate", f"{apart:.3g} logits apart", hint)


def _check_clean(table: _Table, section: Locate) -> None:
    right = table.correct(None)
    accuracy = wilson(int(right.sum()), len(right))
    value = f"{section.pairs} (clean accuracy {accuracy.value:.2f})"
    if accuracy.low <= 1 / section.pairs:
        raise ProbeError(
            "locate.pairs", value, "The base is at chance, so no head can be told from another: try fewer."
        )
    if accuracy.value > 0.99:
        raise ProbeError(
            "locate.pairs", value, "The base is at ceiling, so no head can be told from another: try more."
        )


def _check_moved(table: _Table) -> None:
    if float(np.abs(table.margin("query") - table.margin(None)).max()) < _ROUNDING:
        hint = "Removing heads moves no logit: they are all zero, or a kernel bypasses the hooks."
        raise ModelError("locate", "ablation at the query", hint)


def _score(heads: Sequence[HeadId], table: _Table, seed: int) -> tuple[ScoredHead, ...]:
    """Intervals for every head and column, the role by position, and the better column to read."""
    clean, right = table.margin(None), table.correct(None)
    scores: dict[str, list[Interval]] = {}
    for column in table.columns:
        sign = 1 if column in READS else -1
        scores[column] = bootstrap_mean(sign * (table.margin(column) - clean), seed)
        change = sign * (table.correct(column).astype(float) - right)
        scores[f"{column}_accuracy"] = bootstrap_mean(change, seed)
    aggregates = holm([mcnemar(right, after) for after in table.correct("query")])
    measured = "context" in table.columns
    gathers = holm([mcnemar(right, after) for after in table.correct("context")]) if measured else [False] * len(heads)
    found = []
    for i, head in enumerate(heads):
        own = {name: column[i] for name, column in scores.items()}
        found.append(ScoredHead(head, _role(gathers[i], aggregates[i]), _better(own), own))
    return tuple(found)


def _role(gathers: bool, aggregates: bool) -> Role:
    """Gather heads work on the context, Aggregate heads at the query; by Holm-corrected exact McNemar tests."""
    if gathers and aggregates:
        return "both"
    return "gather" if gathers else "aggregate" if aggregates else "neither"


def _better(scores: Mapping[str, Interval]) -> Reads:
    return max(READS, key=lambda reads: scores[reads].value)


_RANKED_BY: dict[str, Callable[[ScoredHead], float]] = {
    "sharpen": lambda s: s.scores[s.reads].value,
    "ablation": lambda s: s.scores["ablation"].value,
    "aggregate": lambda s: s.scores["query"].value,
    "gather": lambda s: s.scores["context"].value,
}


def rank(heads: Sequence[ScoredHead], method: str) -> tuple[ScoredHead, ...]:
    """Heads by the margin that `method` ranks by, the best first."""
    return tuple(sorted(heads, key=lambda s: (-_RANKED_BY[method](s), s.head)))


def _choose(
    ranked: tuple[ScoredHead, ...],
    sites: Sequence[MixerSpec],
    splice: Splice,
    section: Locate,
    sweeps: Iterable[Sweep],
    seed: int,
    tick: Callable[[], None],
) -> tuple[ScoredHead, ...]:
    """The heads to splice, in order; none where nothing can be spliced."""
    mixers = {spec.name for spec in sites}
    ranked = tuple(s for s in ranked if s.head.mixer in mixers)
    if not ranked:
        return ()
    if splice.num_heads > len(ranked):
        raise PlanError("splice.num_heads", splice.num_heads, f"{len(ranked)} heads of the model can be spliced.")
    by_name = {str(s.head): s for s in ranked}
    if splice.select == "list":
        unknown = [name for name in splice.heads if name not in by_name]
        if unknown:
            first, last = min(s.head for s in ranked), max(s.head for s in ranked)
            raise PlanError("splice.heads", unknown[0], f"Heads that can be spliced go from {first} to {last}.")
        return tuple(by_name[name] for name in splice.heads)
    if splice.select == "random":
        return tuple(rng_of("random heads", seed).sample(sorted(ranked, key=lambda s: s.head), splice.num_heads))
    if splice.select != "sharpen":
        return ranked[: splice.num_heads]
    chosen = [ranked[0]]
    while len(chosen) < splice.num_heads:
        chosen.append(_next_given(chosen, ranked[: section.top_k], sweeps, seed))
        tick()
    return tuple(chosen)


def _next_given(
    chosen: Sequence[ScoredHead], candidates: Sequence[ScoredHead], sweeps: Iterable[Sweep], seed: int
) -> ScoredHead:
    """The head that gains most from a perfect read while those already chosen read perfectly."""
    taken = tuple((s.head, s.reads) for s in chosen)
    left = [s for s in candidates if s.head not in {h for h, _ in taken}]
    if not left:
        raise PlanError("splice.num_heads", len(chosen) + 1, "Raise locate.top_k to at least that number.")
    options = [(s, reads) for s in left for reads in READS]
    variants = [Variant(sharpen=taken), *(Variant(sharpen=(*taken, (s.head, reads))) for s, reads in options)]
    by_sweep = [[scores.margin.cpu() for scores in sweep.at_query(variants)] for sweep in sweeps]
    margins = [torch.cat(parts).double().numpy() for parts in zip(*by_sweep, strict=True)]
    gains = bootstrap_mean(np.stack(margins[1:]) - margins[0], seed)
    best = max(range(len(options)), key=lambda i: gains[i].value)
    head, reads = options[best]
    return ScoredHead(
        head.head, head.role, reads, {**head.scores, "gain_given": gains[best]}, tuple(h for h, _ in taken)
    )


__all__ = ["COLUMNS", "locate", "rank"]
