"""Choosers: ways to choose k heads or one layer of a base before training, and the time that each takes.

All choosers see the locating prompts of the same seed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.studies.head_choice.arms import COLUMNS, LAYER, Budget
from surgery.locate.locating import locate_heads
from surgery.locate.selection import choose
from surgery.models.lookup import family_of
from surgery.recipe import Locate, Splice
from surgery.recipe.methods import RANKINGS
from surgery.registry import load_plugins
from surgery.types import HeadId, HeadSet, ScoredHead

load_plugins(["bench.plugins.baselines"])

MOST = max(int(column) for column in COLUMNS if column != LAYER)


@dataclass(frozen=True)
class Chooser:
    """A value of `splice.select`.

    Attributes:
        label: name in the report.
        select: the value.
        greedy: choose heads one after the other (`sharpen` only). By default the first heads of the ranking.
    """

    label: str
    select: str
    greedy: bool = False


# In the order of measuring and of the report, the cheap ones first. `oracle` must be the first of all: it measures the
# position that each head is trained to read.
CHOOSERS: Mapping[str, Chooser] = {
    "oracle": Chooser("oracle read (`sharpen`)", "sharpen"),
    "greedy": Chooser("oracle read, greedy", "sharpen", greedy=True),
    "ablation": Chooser("ablation", "ablation"),
    "aggregate": Chooser("aggregate", "aggregate"),
    "patching": Chooser("patching", "patching"),
    "attribution": Chooser("attribution", "attribution"),
    "divergence": Chooser("KL-guided layer", "layer_divergence"),
    "random": Chooser("random", "random"),
    "uniform": Chooser("uniform", "uniform"),
}
FORMER = {name: Chooser(name, name) for name in ("gates", "trial")}  # in published results alone
ROWS = {**CHOOSERS, **FORMER}


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, budget: Budget, seed: int, earlier: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Let every chooser choose. Yields the content of the file after each one, so that a stopped run continues.

    Args:
        earlier: the content so far; empty at first.

    Yields:
        `clean`: accuracy of the base on the prompts; `choosers`: name -> `heads` (column -> names in the order of
        choice), `scores` (of the heads, if it ranks), `seconds` and `cpu_seconds`, and `passes` (full forward passes
        of one prompt).
    """
    content: dict[str, Any] = {"choosers": {}, **earlier}
    for name, chooser in CHOOSERS.items():
        if name in content["choosers"]:
            continue
        began, cpu_began = time.perf_counter(), time.process_time()
        if chooser.select in RANKINGS:
            method = RANKINGS[chooser.select].name
            splice = Splice(select=chooser.select, num_heads=MOST if chooser.greedy else 1)
            found = locate_heads(model, tokenizer, budget.locate(method), splice, seed)
            ranking = found.chosen if chooser.greedy else found.heads
            heads = _first(model, [str(s.head) for s in ranking if _can_be_spliced(model, s.head)])
            passes = found.cost["passes"]
            if name == "oracle":
                content["clean"] = found.clean["accuracy"].value
        else:
            heads, found, passes = _unscored(model, chooser.select, seed), None, 0.0
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
        cost = {"passes": passes, "seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1)}
        content["choosers"][name] = {"heads": heads, "scores": _scores(found), **cost}
        yield content


def _first(model: PreTrainedModel, ranking: list[str]) -> dict[str, list[str]]:
    """The first k heads of a ranking, and all heads in the layer of the first. Skips columns with too few heads."""
    columns = {c: ranking[: int(c)] for c in COLUMNS if c != LAYER and int(c) <= len(ranking)}
    return {**columns, LAYER: _layer_of(model, ranking[0])}


def _unscored(model: PreTrainedModel, select: str, seed: int) -> dict[str, list[str]]:
    """The heads that the library chooses without scores."""
    sites = family_of(model.config).sites(model.config)
    ranked = tuple(ScoredHead(head, "unmeasured", None, {}) for spec in sites for head in spec.heads)
    columns = {}
    for column in (c for c in COLUMNS if c != LAYER and int(c) <= len(ranked)):
        splice = Splice(select=select, num_heads=int(column))
        chosen = choose(ranked, sites, splice, Locate(), seed)
        columns[column] = [str(s.head) for s in chosen]
    return {**columns, LAYER: _layer_of(model, columns["1"][0])}


def _layer_of(model: PreTrainedModel, head: str) -> list[str]:
    """All heads of the mixer of this head."""
    mixer = HeadId.parse(head).mixer
    return [str(h) for spec in family_of(model.config).sites(model.config) if spec.name == mixer for h in spec.heads]


def _can_be_spliced(model: PreTrainedModel, head: HeadId) -> bool:
    return any(spec.name == head.mixer for spec in family_of(model.config).sites(model.config))


def _scores(found: HeadSet | None) -> dict[str, dict[str, float]]:
    """Head -> column -> score."""
    if found is None:
        return {}
    heads = {s.head: s for s in (*found.heads, *found.chosen)}  # a greedy choice has further scores
    return {str(h): {name: x.value for name, x in heads[h].scores.items()} for h in sorted(heads)}
