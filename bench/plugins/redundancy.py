"""Ablate heads together, to find heads that substitute for one another, after `surgery locate`.

    surgery locate quickstart locate.methods=[ablation,query,context,patching,sharpen]
    python -m bench.plugins.redundancy runs/quickstart --backups 4

Writes `redundancy.json` into the run folder, with the groups below, and prints their heads and losses. `where`, `fill`,
`top_k` and the prompts are those of the run's section `locate`, whose `methods` need `ablation`.

A model with two copies of an Aggregate head loses nothing if one of them is ablated. So heads are also ablated in turn:
each step adds the head whose ablation costs most on top of the earlier ones (`backup`). Gather and Aggregate heads are
ablated in pairs (`pair`), and all chosen heads at once (`chosen`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from bench.common import parser, quiet_on_one_thread
from surgery.files.atomic import read_json, write_json
from surgery.locate.ablation import Ablation
from surgery.locate.ablation_sweep import ablate
from surgery.locate.batches import PromptBatches
from surgery.locate.scores import Array, plain
from surgery.locate.selection import rank
from surgery.models.loading import load_model, load_tokenizer
from surgery.models.torch_scans import torch_scans
from surgery.recipe import load_recipe
from surgery.stats import bootstrap_mean
from surgery.types import HeadId, HeadSet, Interval, ScoredGroup, ScoredHead, head_set_from_json, to_json

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
            batches[index] = [plain(scores)[:2] for scores in (run.scores, *ablate(run, sets, ablation))]
            del run  # frees its activations before the next batch runs
    clean, *changed = [np.concatenate(parts, axis=1) for parts in zip(*batches.values(), strict=True)]
    return clean, changed


def ablate_in_turn(
    ranked: Sequence[ScoredHead], count: int, top_k: int, ablate_sets: AblateSets, seed: int
) -> list[ScoredGroup]:
    """Ablate heads in turn. Each step adds the head that costs most on top of the earlier ones.

    Args:
        ranked: heads, ranked by ablation. The first `top_k` are candidates, and `count` of them are ablated.

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
    return groups


def ablate_pairs(scored: Sequence[ScoredHead], each: int, ablate_sets: AblateSets, seed: int) -> list[ScoredGroup]:
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
    return sorted(groups, key=lambda g: -g.scores["ablation"].value)


def ablate_together(heads: Sequence[HeadId], ablate_sets: AblateSets, seed: int) -> ScoredGroup:
    """Ablate all of these heads at once."""
    clean, (changed,) = ablate_sets([heads])
    return ScoredGroup("chosen", tuple(heads), _losses(clean, changed, "ablation", seed))


def _losses(before: Array, after: Array, name: str, seed: int) -> dict[str, Interval]:
    """Intervals of the margin and the accuracy lost."""
    margin, accuracy = bootstrap_mean(before - after, seed)
    return {name: margin, f"{name}_accuracy": accuracy}


def redundancy(prompts: PromptBatches, heads: HeadSet, backups: int) -> list[ScoredGroup]:
    """Ablate heads in turn, in pairs if `query` and `context` were measured, and all chosen heads together.

    Args:
        prompts: of the run, whose section has `ablation` in `methods`.
        heads: the located heads. Those that a search dropped are left out.
        backups: number of heads to ablate in turn, at most `locate.top_k`.
    """
    section, seed = prompts.section, heads.seed
    most = max(s.n for s in heads.heads)
    measured = [s for s in heads.heads if s.n == most]
    sets = partial(ablate_sets, prompts, Ablation(section.where, section.fill))
    with torch_scans(prompts.model):
        groups = ablate_in_turn(rank(measured, "ablation"), backups, section.top_k, sets, seed)
        if {"query", "context"} <= set(section.methods):
            groups += ablate_pairs(measured, min(backups, 4), sets, seed)
        return groups + ([ablate_together([s.head for s in heads.chosen], sets, seed)] if heads.chosen else [])


def main(arguments: Sequence[str] | None = None) -> None:
    arguments_parser = parser(__doc__)
    arguments_parser.add_argument("run", type=Path, help="run folder of `surgery locate`")
    arguments_parser.add_argument("--backups", type=int, default=4, help="heads to ablate in turn (default: 4)")
    given = arguments_parser.parse_args(arguments)
    quiet_on_one_thread()
    recipe, heads = load_recipe(given.run / "recipe.yaml"), head_set_from_json(read_json(given.run / "heads.json"))
    if "ablation" not in recipe.locate.methods:
        sys.exit("locate.methods lacks ablation. Add it, and locate again.")
    tokenizer = load_tokenizer(recipe.base)
    prompts = PromptBatches(load_model(recipe.base).eval(), tokenizer, recipe.locate, recipe.seed)
    groups = redundancy(prompts, heads, given.backups)
    write_json(given.run / "redundancy.json", to_json(replace(heads, groups=tuple(groups)))["groups"])
    for group in groups:
        loss = group.scores["ablation"]
        sys.stdout.write(f"{group.kind} {' '.join(map(str, group.heads))}: {loss.value:.3f} logits lost\n")


if __name__ == "__main__":
    main()
