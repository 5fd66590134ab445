"""Rank heads by their scores, and choose the heads to splice.

Shape legend: C heads, A arms (a head may enter by several columns), N prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from surgery.errors import PlanError
from surgery.probes.documents import rng_of
from surgery.recipe import Locate, Splice
from surgery.recipe.methods import METHODS, RANKINGS, is_greedy
from surgery.stats import bootstrap_mean
from surgery.types import READS, HeadId, HeadSet, MixerSpec, Reads, ScoredHead

Candidate = tuple[HeadId, Reads]
# Takes candidates and the oracle reads made already. Returns (candidates,N) further gains in logits.
Gains = Callable[[Sequence[Candidate], Sequence[Candidate]], np.ndarray]


def rank(heads: Sequence[ScoredHead], select: str) -> tuple[ScoredHead, ...]:
    """Rank heads, the best first.

    `select` is a value of `splice.select` that ranks. A head's value is the column named by its `reads` if the method
    has it, otherwise its best column.
    """
    columns = [column.name for column in RANKINGS[select].columns]

    def value(scored: ScoredHead) -> float:
        names = [scored.reads] if scored.reads in columns else columns
        return max((scored.scores[name].value for name in names if name in scored.scores), default=-math.inf)

    return tuple(sorted(heads, key=lambda s: (-value(s), s.head)))


def ranking_of(splice: Splice, section: Locate) -> str:
    """Choose the ranking of the heads: `splice.select` if it ranks, otherwise a measured method that does.

    Among the measured methods, that of the default `splice.select` comes first.
    """
    if splice.select in RANKINGS:
        return splice.select
    default = str(Splice.model_fields["select"].default)
    measured = [METHODS[method].ranks for method in section.methods if METHODS[method].ranks]
    return measured[0] if measured and default not in measured else default


def choose(
    ranked: tuple[ScoredHead, ...],
    sites: Sequence[MixerSpec],
    splice: Splice,
    section: Locate,
    seed: int,
    gains: Gains | None = None,
) -> tuple[ScoredHead, ...]:
    """Choose the heads to splice among `ranked`, in order; none if the model has no mixer that can be spliced.

    `gains` measures the second and further heads of a greedy ranking.

    Raises:
        PlanError: more heads than can be spliced, or a listed head that cannot.
    """
    mixers = {spec.name for spec in sites}
    ranked = tuple(s for s in ranked if s.head.mixer in mixers)
    if not ranked:
        return ()
    if splice.num_heads > len(ranked):
        raise PlanError(
            "splice.num_heads", splice.num_heads, f"Set at most {len(ranked)}: no more heads can be spliced."
        )
    in_order = sorted(ranked, key=lambda s: s.head)
    if splice.select == "list":
        by_name = {str(s.head): s for s in ranked}
        unknown = [name for name in splice.heads if name not in by_name]
        if unknown:
            hint = f"Use heads from {in_order[0].head} to {in_order[-1].head}."
            raise PlanError("splice.heads", unknown[0], hint)
        return tuple(by_name[name] for name in splice.heads)
    if splice.select == "random":
        return tuple(rng_of("random heads", seed).sample(in_order, splice.num_heads))
    if splice.select == "uniform":
        step = len(in_order) / splice.num_heads
        return tuple(in_order[int((i + 0.5) * step)] for i in range(splice.num_heads))
    if not is_greedy(splice.select):
        return ranked[: splice.num_heads]
    chosen = [ranked[0]]
    while len(chosen) < splice.num_heads:
        assert gains is not None
        chosen.append(_next_given(chosen, ranked[: section.top_k], gains, seed))
    return tuple(chosen)


def can_choose_again(measured: Splice, splice: Splice) -> bool:
    """Whether `choose_again` can choose heads for `splice` from heads that were located with `measured`.

    Greedy choice needs an equal or larger number of heads that was chosen the same way: its first heads are the same.
    The accuracy of the base was checked only if `measured` selects by a ranking.
    """
    if splice.select in RANKINGS and measured.select not in RANKINGS:
        return False
    alike = measured.select == splice.select and measured.num_heads >= splice.num_heads
    return alike or not is_greedy(splice.select) or splice.num_heads == 1


def choose_again(heads: HeadSet, sites: Sequence[MixerSpec], splice: Splice, section: Locate, seed: int) -> HeadSet:
    """Choose heads for another `select` or `num_heads` from heads that are measured already.

    The result equals that of a new measurement, except for its cost. Check `can_choose_again` before. `section` and
    `seed` must be those of the measurement. Raises as `choose`.
    """
    ranked = rank(heads.heads, ranking_of(splice, section))
    if is_greedy(splice.select) and splice.num_heads > 1:
        chosen = heads.chosen[: splice.num_heads]
    else:
        chosen = choose(ranked, sites, splice, section, seed)
    return replace(heads, heads=ranked, chosen=chosen, method=splice.select)


def _next_given(chosen: Sequence[ScoredHead], candidates: Sequence[ScoredHead], gains: Gains, seed: int) -> ScoredHead:
    """Choose the head that gains most from an oracle read in addition to those of the chosen heads."""
    taken = [(s.head, s.reads) for s in chosen if s.reads]
    left = [s for s in candidates if s.head not in {h for h, _ in taken}]
    if not left:
        raise PlanError("splice.num_heads", len(chosen) + 1, f"Set locate.top_k to {len(chosen) + 1} or more.")
    options = [(s, reads) for s in left for reads in READS]
    gain = bootstrap_mean(gains([(s.head, reads) for s, reads in options], taken), seed)
    best = max(range(len(options)), key=lambda i: gain[i].value)
    head, reads = options[best]
    return ScoredHead(
        head.head, head.role, reads, {**head.scores, "gain_given": gain[best]}, tuple(h for h, _ in taken)
    )
