"""From scores to the heads that are spliced. Owns: ranking and choice. Must never know: how a score was measured.

Some methods rank by a score; `sharpen` takes the best head, and each further one by what it gains given those before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from surgery.errors import PlanError
from surgery.locate.ablation_sweep import READS
from surgery.probes.documents import rng_of
from surgery.recipe import Locate, Splice
from surgery.stats import bootstrap_mean
from surgery.types import HeadId, Interval, MixerSpec, Reads, ScoredHead

Candidate = tuple[HeadId, Reads]
# (candidates, those that read perfectly already) -> (candidates, N): what each gains, prompt by prompt.
Gains = Callable[[Sequence[Candidate], Sequence[Candidate]], np.ndarray]


def better_read(scores: Mapping[str, Interval]) -> Reads | None:
    """The column of the sharpen test with the larger gain; None where it was not measured."""
    measured: list[Reads] = [reads for reads in READS if reads in scores]
    return max(measured, key=lambda reads: scores[str(reads)].value, default=None)


def _sharpen(scored: ScoredHead) -> float:
    return -np.inf if scored.reads is None else scored.scores[scored.reads].value


def _by(column: str) -> Callable[[ScoredHead], float]:
    def value(scored: ScoredHead) -> float:
        return scored.scores[column].value

    return value


RANKED_BY: dict[str, Callable[[ScoredHead], float]] = {
    "sharpen": _sharpen,
    "ablation": _by("ablation"),
    "aggregate": _by("query"),
    "gather": _by("context"),
    "attribution": _by("attribution"),
    "integrated_gradients": _by("integrated_gradients"),
    "layer_divergence": _by("layer_divergence"),
}


def rank(heads: Sequence[ScoredHead], method: str) -> tuple[ScoredHead, ...]:
    """Heads by what `method` ranks by, the best first; those that a search has dropped come last."""
    most = max((s.n for s in heads), default=0)
    return tuple(sorted(heads, key=lambda s: (s.n < most, -RANKED_BY[method](s), s.head)))


def choose(
    ranked: tuple[ScoredHead, ...],
    sites: Sequence[MixerSpec],
    splice: Splice,
    section: Locate,
    seed: int,
    gains: Gains,
) -> tuple[ScoredHead, ...]:
    """The heads to splice, in order; none where nothing can be spliced.

    Args:
        ranked: by the method of `splice.select`, where it has one.
        gains: measures the further heads of `sharpen`.

    Raises:
        PlanError: more heads than can be spliced, or a listed head that cannot.
    """
    mixers = {spec.name for spec in sites}
    ranked = tuple(s for s in ranked if s.head.mixer in mixers)
    if not ranked:
        return ()
    if splice.num_heads > len(ranked):
        raise PlanError("splice.num_heads", splice.num_heads, f"{len(ranked)} heads of the model can be spliced.")
    in_order = sorted(ranked, key=lambda s: s.head)
    if splice.select == "list":
        by_name = {str(s.head): s for s in ranked}
        unknown = [name for name in splice.heads if name not in by_name]
        if unknown:
            hint = f"Heads that can be spliced go from {in_order[0].head} to {in_order[-1].head}."
            raise PlanError("splice.heads", unknown[0], hint)
        return tuple(by_name[name] for name in splice.heads)
    if splice.select == "random":
        return tuple(rng_of("random heads", seed).sample(in_order, splice.num_heads))
    if splice.select == "uniform":
        step = len(in_order) / splice.num_heads
        return tuple(in_order[int((i + 0.5) * step)] for i in range(splice.num_heads))
    if splice.select != "sharpen":
        return ranked[: splice.num_heads]
    chosen = [ranked[0]]
    while len(chosen) < splice.num_heads:
        chosen.append(_next_given(chosen, ranked[: section.top_k], gains, seed))
    return tuple(chosen)


def _next_given(chosen: Sequence[ScoredHead], candidates: Sequence[ScoredHead], gains: Gains, seed: int) -> ScoredHead:
    """The head that gains most from a perfect read while those already chosen read perfectly."""
    taken = [(s.head, s.reads) for s in chosen if s.reads]
    left = [s for s in candidates if s.head not in {h for h, _ in taken}]
    if not left:
        raise PlanError("splice.num_heads", len(chosen) + 1, "Raise locate.top_k to at least that number.")
    options = [(s, reads) for s in left for reads in READS]
    found = bootstrap_mean(gains([(s.head, reads) for s, reads in options], taken), seed)
    best = max(range(len(options)), key=lambda i: found[i].value)
    head, reads = options[best]
    scores = {**head.scores, "gain_given": found[best]}
    return ScoredHead(head.head, head.role, reads, scores, tuple(h for h, _ in taken))
