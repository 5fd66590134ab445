"""Heads that stand in for one another. Owns: removal of heads given that others are gone, and of heads together.

A model with a duplicated Aggregate head loses nothing by either removal alone. So the most necessary heads are taken
away one after the other, each the one that costs most given those before; Gather and Aggregate heads are tried in
pairs; and all chosen heads at once. Must never know: models, files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from surgery.interventions.ablation import Removal
from surgery.locate.ablation_sweep import Sweep
from surgery.locate.scores import Array, plain
from surgery.scoring.ranking import ChoiceScores
from surgery.stats import bootstrap_mean
from surgery.types import HeadId, Interval, ScoredGroup, ScoredHead

# (sets of heads) -> for each (2,N): margins, right answers; all prompts, clean first.
Without = Callable[[Sequence[Sequence[HeadId]]], tuple[Array, list[Array]]]


def without_over(map_: Callable[[Callable[[int, Sweep], list[Array]]], list[list[Array]]], removal: Removal) -> Without:
    """Removes sets of heads in every batch; `map_` is `Prompts.map`."""

    def without(sets: Sequence[Sequence[HeadId]]) -> tuple[Array, list[Array]]:
        def one(_: int, sweep: Sweep) -> list[Array]:
            scores: list[ChoiceScores] = [sweep.clean, *sweep.without(sets, removal)]
            return [plain(s) for s in scores]

        joined = [np.concatenate(parts, axis=1) for parts in zip(*map_(one), strict=True)]
        return joined[0], joined[1:]

    return without


def backups(
    ranked: Sequence[ScoredHead], count: int, top_k: int, without: Without, seed: int, tick: Callable[[], None]
) -> list[ScoredGroup]:
    """The order in which heads go when each is the one that costs most given those before.

    Args:
        ranked: by ablation; the first `top_k` are candidates, and `count` of them go.

    Returns:
        One group a step: the heads that are off so far, the last one new. `ablation` is what all of them cost together,
        `ablation_given` what the last one cost given the others, `alone` what the last one costs by itself.
    """
    candidates = list(ranked[:top_k])
    off: list[ScoredHead] = []
    found: list[ScoredGroup] = []
    before: Array | None = None
    for _ in range(min(count, len(candidates))):
        clean, removed = without([[*(s.head for s in off), s.head] for s in candidates])
        worst = int(np.argmin([r[0].mean() for r in removed]))
        new = candidates.pop(worst)
        off.append(new)
        scores = {
            **_losses(clean, removed[worst], "ablation", seed),
            **_losses(clean if before is None else before, removed[worst], "ablation_given", seed),
            "alone": new.scores["ablation"],
        }
        before = removed[worst]
        found.append(ScoredGroup("backup", tuple(s.head for s in off), scores))
        tick()
    return found


def pairs(
    ranked: Sequence[ScoredHead], each: int, without: Without, seed: int, tick: Callable[[], None]
) -> list[ScoredGroup]:
    """Gather x Aggregate: the `each` best of both kinds, off together.

    Gather heads are those that the context ablation ranks first, Aggregate heads those of the query ablation. `alone`
    is the sum of what the two cost one by one, `interaction` what the pair costs beyond that: negative for heads in one
    chain, where either alone does the harm, positive for heads that stand in for one another.
    """
    kinds = [sorted(ranked, key=lambda s: (-s.scores[c].value, s.head))[:each] for c in ("context", "query")]
    sets = sorted({tuple(sorted({g.head, a.head})) for g in kinds[0] for a in kinds[1] if g.head != a.head})
    if not sets:
        return []
    singles = sorted({head for pair in sets for head in pair})
    clean, removed = without([*([head] for head in singles), *sets])
    alone = {head: clean[0] - r[0] for head, r in zip(singles, removed[: len(singles)], strict=True)}
    found = []
    for pair, off in zip(sets, removed[len(singles) :], strict=True):
        summed = sum(alone[head] for head in pair)
        more = bootstrap_mean(np.stack([summed, clean[0] - off[0] - summed]), seed)
        scores = {**_losses(clean, off, "ablation", seed), "alone": more[0], "interaction": more[1]}
        found.append(ScoredGroup("pair", pair, scores))
    tick()
    return sorted(found, key=lambda g: -g.scores["ablation"].value)


def together(heads: Sequence[HeadId], without: Without, seed: int) -> ScoredGroup:
    """All of these heads off at once."""
    clean, (off,) = without([heads])
    return ScoredGroup("chosen", tuple(heads), _losses(clean, off, "ablation", seed))


def _losses(before: Array, after: Array, name: str, seed: int) -> dict[str, Interval]:
    """Margin and accuracy lost."""
    margin, accuracy = bootstrap_mean(before - after, seed)
    return {name: margin, f"{name}_accuracy": accuracy}
