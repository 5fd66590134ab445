"""Rank heads by their scores, drop heads early in a search, and choose the heads to splice.

Shape legend: C heads, A arms (a head may enter by several columns), N prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from surgery.errors import PlanError
from surgery.locate.scores import Table
from surgery.probes.documents import rng_of
from surgery.recipe import Locate, Splice
from surgery.recipe.methods import METHODS, RANKINGS, is_greedy
from surgery.stats import bootstrap_mean
from surgery.types import READS, HeadId, HeadSet, MixerSpec, Reads, ScoredHead

Candidate = tuple[HeadId, Reads]
# Takes candidates and the oracle reads made already. Returns (candidates,N) further gains in logits.
Gains = Callable[[Sequence[Candidate], Sequence[Candidate]], np.ndarray]


def rank(heads: Sequence[ScoredHead], select: str) -> tuple[ScoredHead, ...]:
    """Rank heads, the best first. Heads that a search has dropped come last.

    `select` is a value of `splice.select` that ranks. A head's value is the column named by its `reads` if the method
    has it, otherwise its best column.
    """
    columns = [column.name for column in RANKINGS[select].columns]

    def value(scored: ScoredHead) -> float:
        names = [scored.reads] if scored.reads in columns else columns
        return max((scored.scores[name].value for name in names if name in scored.scores), default=-math.inf)

    most = max((s.n for s in heads), default=0)
    return tuple(sorted(heads, key=lambda s: (s.n < most, -value(s), s.head)))


def ranking_of(splice: Splice, section: Locate) -> str:
    """Choose the ranking of the heads: `splice.select` if it ranks, otherwise a measured method that does.

    Among the measured methods, that of the default `splice.select` comes first.
    """
    if splice.select in RANKINGS:
        return splice.select
    default = str(Splice.model_fields["select"].default)
    measured = [METHODS[method].ranks for method in section.methods if METHODS[method].ranks]
    return measured[0] if measured and default not in measured else default


def search_rounds(first: int, examples: int) -> list[int]:
    """Number of prompts measured by the end of each round of a search: `first`, doubled, up to all `examples`."""
    counts = []
    while first < examples:
        counts.append(first)
        first *= 2
    return [*counts, examples]


def still_candidates(
    table: Table,
    alive: Sequence[int],
    heads: Sequence[HeadId],
    sites: Sequence[MixerSpec],
    section: Locate,
    splice: Splice,
    rounds: int,
) -> list[int]:
    """Drop heads that cannot be among the best by the ranking that selects heads. Layers stay.

    Heads of mixers that cannot be spliced (not in `sites`) compete among themselves. `heads` are the first items.
    """
    assert section.search is not None
    keep = max(splice.num_heads, section.top_k if splice.num_heads > 1 else 1)
    mixers = {spec.name for spec in sites}
    left = {i for i in alive if i >= len(heads)}
    arms = [table.effect(c.name)[: len(heads)] for c in RANKINGS[ranking_of(splice, section)].columns]
    for can_be_spliced in (True, False):
        kind = [i for i in alive if i < len(heads) and (heads[i].mixer in mixers) == can_be_spliced]
        left.update(survivors(arms, kind, keep, section.search.risk, rounds))
    return sorted(left)


def survivors(
    arms_ACN: Sequence[NDArray[np.float64]], alive: Sequence[int], keep: int, risk: float, num_rounds: int
) -> list[int]:
    """Successive elimination: keep the heads that may still be among the best `keep`.

    A head is dropped if it is worse than each of the best k so far by a paired one-sided t-test. The tests of all pairs
    of heads and all rounds share the level `risk` (Bonferroni). A head of the true best k is at least as good as one of
    any k heads, so dropping it means that a test rejects a true hypothesis. The probability of dropping any of them is
    at most `risk`, if means of margins are normally distributed.

    Related: racing (Maron and Moore 1997), and successive halving (Karnin et al. 2013), which drops half of the heads
    in each round without controlling the risk.

    Args:
        arms_ACN: scores by prompt, the larger the better. A head's value is its best arm. NaN for dropped heads.
        alive: heads that were not dropped before.
    """
    if len(alive) <= keep:
        return list(alive)
    scores_ACN = np.stack([arm[list(alive)] for arm in arms_ACN])
    scores_ACN = scores_ACN[:, :, ~np.isnan(scores_ACN).any((0, 1))]
    A, _, N = scores_ACN.shape
    means_AC = scores_ACN.mean(-1)
    best_C = means_AC.argmax(0)
    order = np.argsort(-means_AC.max(0), kind="stable")
    level = risk / (num_rounds * (A * arms_ACN[0].shape[0]) ** 2)
    from scipy.stats import t  # slow to import

    limit = float(t.isf(level, N - 1))
    worse_AC = np.ones((A, scores_ACN.shape[1]), dtype=bool)
    for best in order[:keep]:
        lead_ACN = scores_ACN[best_C[best], best] - scores_ACN
        error_AC = lead_ACN.std(-1, ddof=1) / math.sqrt(N)
        worse_AC &= lead_ACN.mean(-1) > limit * error_AC + 1e-12
    places = set(order[:keep].tolist()) | set(np.flatnonzero(~worse_AC.all(0)).tolist())
    return [head for place, head in enumerate(alive) if place in places]


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


def can_choose_again(measured: Splice, splice: Splice, section: Locate) -> bool:
    """Whether `choose_again` can choose heads for `splice` from heads that were located with `measured`.

    A search drops heads depending on the ranking, so it needs a new measurement. Greedy choice needs an equal or larger
    number of heads that was chosen the same way: its first heads are the same.
    The accuracy of the base was checked only if `measured` selects by a ranking.
    """
    if section.search is not None:
        return False
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
