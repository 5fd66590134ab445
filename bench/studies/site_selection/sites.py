"""Score and choose a site with each method, for one base and one seed of prompts.

All methods see the same prompts: the locating prompts of that seed.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.plugins.baselines import attribution, layer_divergence
from bench.studies.site_selection.arms import Budget
from surgery.data.encoding import encode
from surgery.locate.clean_run import run_clean
from surgery.locate.locating import locate_heads
from surgery.locate.selection import rank
from surgery.models.lookup import family_of
from surgery.probes.documents import rng_of
from surgery.probes.kv_retrieval import kv_document
from surgery.recipe import Locate, Splice
from surgery.types import READS, HeadSet

BATCH = 32


def choose(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, budget: Budget, seed: int) -> dict[str, Any]:
    """Scores of every head and layer, and the choice of each method.

    Returns:
        `methods`: method -> heads, best first (four by sharpen, one by the others); `layers`: method -> layer;
        `reads`: head -> the gold position that it gains more from; `scores`: head -> method -> logits of margin;
        `divergence`: KL by layer, in nats; `clean`: accuracy on the prompts.
    """
    locating = Locate(pairs=budget.locate_pairs, examples=budget.locate_examples, batch_size=BATCH)
    found = locate_heads(model, tokenizer, locating, Splice(select="sharpen", num_heads=4), seed)
    attributed, divergence = _baseline_scores(model, tokenizer, budget, seed)
    names = sorted(s.head for s in found.heads)
    ablated = rank(found.heads, "ablation")
    return {
        "methods": {
            "sharpen": [str(s.head) for s in found.chosen],
            "ablation": [str(ablated[0].head)],
            "attribution": [max(attributed, key=lambda head: attributed[head])],
            "random": [str(h) for h in rng_of("random heads", seed).sample(names, 1)],
        },
        "layers": {
            "divergence": max(range(len(divergence)), key=lambda layer: divergence[layer]),
            # One attention layer, spaced evenly over L layers, is the one in the middle.
            "uniform": model.config.num_hidden_layers // 2,
        },
        "reads": {str(s.head): s.reads for s in found.heads},
        "scores": _scores(found, attributed),
        "divergence": divergence,
        "clean": found.clean["accuracy"].value,
        "pairs": budget.locate_pairs,
    }


def _scores(found: HeadSet, attributed: dict[str, float]) -> dict[str, dict[str, float]]:
    return {
        str(s.head): {
            "sharpen": max(s.scores[reads].value for reads in READS),
            "ablation": s.scores["ablation"].value,
            "query": s.scores["query"].value,
            "attribution": attributed[str(s.head)],
        }
        for s in sorted(found.heads, key=lambda s: s.head)
    }


def _baseline_scores(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, budget: Budget, seed: int
) -> tuple[dict[str, float], list[float]]:
    """Mean attribution by head, mean divergence by layer, on the prompts that `locate` draws for this seed."""
    documents = [
        kv_document(rng_of("locate", seed, i), budget.locate_pairs, split="eval") for i in range(budget.locate_examples)
    ]
    heads = [str(h) for spec in family_of(model.config).mixers(model.config) for h in spec.heads]
    by_head, by_layer = [], []
    for start in range(0, len(documents), BATCH):
        chunk = documents[start : start + BATCH]
        run = run_clean(model, encode(chunk, tokenizer, padding_side="left", until_answer=True))
        by_head.append(attribution(run))
        by_layer.append(layer_divergence(run))
    means = torch.cat(by_head, 1).mean(1).tolist()
    return dict(zip(heads, means, strict=True)), torch.cat(by_layer, 1).mean(1).tolist()
