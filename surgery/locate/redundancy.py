"""Ablate heads together, to find heads that substitute for one another.

A model with two copies of an Aggregate head loses nothing if one of them is ablated. So heads are also ablated in turn:
each step adds the head whose ablation costs most on top of the earlier ones. Gather and Aggregate heads are ablated in
pairs, and all chosen heads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from surgery.interventions.ablation import Ablation
from surgery.locate.ablation_sweep import ablate
from surgery.locate.batches import PromptBatches
from surgery.locate.scores import Array, plain
from surgery.stats import bootstrap_mean
from surgery.types import HeadId, Interval, ScoredGroup, ScoredHead

# Takes sets of heads. Returns (2,N) of the clean model, and a list with (2,N) of each set, as `ablate_sets` does.
AblateSets = Callable[[Sequence[Sequence[HeadId]]], tuple[Array, list[Array]]]


def ablate_sets(
    prompts: PromptBatches, ablation: Ablation, sets: Sequence[Sequence[HeadId]]
) -> tuple[Array, list[Array]]:
    """Ablate sets of heads in every batch.

    Returns:
        (2,N) of the clean model, and (2,N) of each set: margins, and 1 or 0 for right or wrong.
    """
    with prompts.gathered() as batches:
        for index, run in prompts.clean_runs():
            batches[index] = [plain(scores) for scores in (run.scores, *ablate(run, sets, ablation))]
            del run  # frees its activations before the next batch runs
    clean, *changed = [np.concatenate(parts, axis=1) for parts in zip(*batches.values(), strict=True)]
    return clean, changed


def ablate_in_turn(
    ranked: Sequence[ScoredHead], count: int, top_k: int, ablate_sets: AblateSets, seed: int, tick: Callable[[], None]
) -> list[ScoredGroup]:
    """Ablate heads in turn. Each step adds the head that costs most on top of the earlier ones.

    Args:
        ranked: heads, ranked by ablation. The first `top_k` are candidates, and `count` of them are ablated.
        tick: called after each step.

    Returns:
        One group for each step: the heads ablated so far, the new one last. Its scores are margins lost: `ablation` by
        all of them together, `ablation_given` by the new head on top of the others, `alone` by the new head alone.
    """
    candidates = list(ranked[:top_k])
    off: list[ScoredHead] = []
    groups: list[ScoredGroup] = []
    before: Array | None = None
    for _ in range(min(count, len(candidates))):
        clean, changed = ablate_sets([[*(s.head for s in off), s.head] for s in candidates])
        worst = int(np.argmin([scores[0].mean() for scores in changed]))
        new = candidates.pop(worst)
        off.append(new)
        scores = {
            **_losses(clean, changed[worst], "ablation", seed),
            **_losses(clean if before is None else before, changed[worst], "ablation_given", seed),
            "alone": new.scores["ablation"],
        }
        before = changed[worst]
        groups.append(ScoredGroup("backup", tuple(s.head for s in off), scores))
        tick()
    return groups


def ablate_pairs(
    scored: Sequence[ScoredHead], each: int, ablate_sets: AblateSets, seed: int, tick: Callable[[], None]
) -> list[ScoredGroup]:
    """Ablate pairs of Gather and Aggregate heads.

    Args:
        each: number of heads of each kind: the best by the column `context`, and by `query`.

    Returns:
        Pairs, the most costly first. `alone` is the sum of the margins lost by ablating either head. `interaction` is
        the further loss of ablating both. It is negative for heads in one chain, where losing either has the full
        effect, and positive for heads that substitute for one another.
    """
    best = [sorted(scored, key=lambda s: (-s.scores[c].value, s.head))[:each] for c in ("context", "query")]
    pairs = sorted({tuple(sorted({g.head, a.head})) for g in best[0] for a in best[1] if g.head != a.head})
    if not pairs:
        return []
    singles = sorted({head for pair in pairs for head in pair})
    clean, changed = ablate_sets([*([head] for head in singles), *pairs])
    alone = {head: clean[0] - scores[0] for head, scores in zip(singles, changed[: len(singles)], strict=True)}
    groups = []
    for pair, both in zip(pairs, changed[len(singles) :], strict=True):
        summed = sum(alone[head] for head in pair)
        sums = bootstrap_mean(np.stack([summed, clean[0] - both[0] - summed]), seed)
        scores = {**_losses(clean, both, "ablation", seed), "alone": sums[0], "interaction": sums[1]}
        groups.append(ScoredGroup("pair", pair, scores))
    tick()
    return sorted(groups, key=lambda g: -g.scores["ablation"].value)


def ablate_together(heads: Sequence[HeadId], ablate_sets: AblateSets, seed: int) -> ScoredGroup:
    """Ablate all of these heads at once."""
    clean, (changed,) = ablate_sets([heads])
    return ScoredGroup("chosen", tuple(heads), _losses(clean, changed, "ablation", seed))


def _losses(before: Array, after: Array, name: str, seed: int) -> dict[str, Interval]:
    """Intervals of the margin and the accuracy lost."""
    margin, accuracy = bootstrap_mean(before - after, seed)
    return {name: margin, f"{name}_accuracy": accuracy}
