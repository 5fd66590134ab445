"""Does locating find the same heads again? Split halves and probe seeds, on the shipped pico model.

    python -m bench.stability                       (from the repository's root; about 20 minutes on one core)
    python -m bench.stability --examples 128        (of each seed; a few minutes)

Every head's ablation margin and sharpen gain is measured prompt by prompt for several probe seeds. Two disjoint sets of
n prompts then give two rankings: halves drawn from one seed's prompts, again and again, or the prompts of two seeds.
`rank` is Spearman's correlation among the candidates (heads whose 95% interval excludes 0 in either set, at least 8),
`top k` the share of the first set's k best heads that are among the second's k best. Where fewer than k heads have an
effect, the places behind them are drawn from heads that are all worth nothing, and no number of prompts settles those.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.encoding import encode
from surgery.locate.ablation_sweep import READS, Sweep, Variant
from surgery.models.loading import load_model, load_tokenizer
from surgery.models.lookup import family_of
from surgery.probes.documents import rng_of
from surgery.probes.kv_retrieval import kv_document
from surgery.recipe import Base
from surgery.scoring.ranking import ChoiceScores
from surgery.stats import bootstrap_mean

ROOT = Path(__file__).parents[1]
PICO = ROOT / "checkpoints" / "pico-mamba2"
SPLITS = 40  # random halves of each seed's prompts
TOPS = (1, 8, 10)
AT_LEAST = 8  # candidates
Effects = NDArray[np.float64]  # (R,H,N): logits by column, head, prompt; a head's score is that of its best column


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int, examples: int, pairs: int, size: int = 32
) -> dict[str, Effects]:
    """What each head's ablation takes from the margin, (1,H,N), and what its perfect reads give, (2,H,N)."""
    documents = [kv_document(rng_of("locate", seed, i), pairs, split="eval") for i in range(examples)]
    heads = [head for spec in family_of(model.config).mixers(model.config) for head in spec.heads]
    found: dict[str, list[Effects]] = {"ablation": [], "sharpen": []}
    for start in range(0, examples, size):
        batch = encode(documents[start : start + size], tokenizer, padding_side="left", until_answer=True)
        sweep = Sweep(model, batch)
        found["ablation"].append(-_change(sweep.clean, sweep.without([[h] for h in heads]))[None])
        reads = [_change(sweep.clean, sweep.at_query([Variant(sharpen=((h, r),)) for h in heads])) for r in READS]
        found["sharpen"].append(np.stack(reads))
    return {method: np.concatenate(parts, axis=-1) for method, parts in found.items()}


def _change(clean: ChoiceScores, changed: Sequence[ChoiceScores]) -> Effects:
    """(heads,N) margins gained."""
    return torch.stack([scores.margin - clean.margin for scores in changed]).double().numpy()


def agreement(one: Effects, other: Effects) -> dict[str, float]:
    """`rank`: Spearman's correlation among the candidates; `top K`: overlap of the best; number of `candidates`."""
    scores = np.stack([x.mean(-1).max(0) for x in (one, other)])
    chosen = np.flatnonzero(_excludes_zero(one) | _excludes_zero(other))
    if len(chosen) < AT_LEAST:
        chosen = np.argsort(-scores.mean(0))[:AT_LEAST]
    ranks = scores[:, chosen].argsort(1).argsort(1)
    first, second = (np.argsort(-row).tolist() for row in scores)
    overlaps = {f"top {k}": len({*first[:k]} & {*second[:k]}) / k for k in TOPS}
    return {"rank": float(np.corrcoef(ranks)[0, 1]), **overlaps, "candidates": len(chosen)}


def _excludes_zero(effects: Effects) -> NDArray[np.bool_]:
    """(H,) of each head's best column."""
    best = effects[effects.mean(-1).argmax(0), np.arange(effects.shape[1])]
    return np.array([i.low > 0 or i.high < 0 for i in bootstrap_mean(best, seed=0, resamples=500)])


def halves(effects: Sequence[Effects], n: int) -> Iterator[tuple[Effects, Effects]]:
    """Two disjoint draws of n prompts of the same seed."""
    rng = np.random.default_rng(n)
    for one in effects:
        for _ in range(SPLITS // len(effects)):
            order = rng.permutation(one.shape[-1])
            yield one[..., order[:n]], one[..., order[n : 2 * n]]


def probe_seeds(effects: Sequence[Effects], n: int) -> Iterator[tuple[Effects, Effects]]:
    """The same n prompts, by number, of each two seeds; as often as n fits."""
    for one, other in combinations(effects, 2):
        for start in range(0, one.shape[-1] - n + 1, n):
            yield one[..., start : start + n], other[..., start : start + n]


KINDS: Mapping[str, Callable[[Sequence[Effects], int], Iterator[tuple[Effects, Effects]]]] = {
    "halves": halves,
    "seeds": probe_seeds,
}


def table(measured: Sequence[Mapping[str, Effects]]) -> list[dict[str, float | int | str]]:
    """One row for each method, kind of comparison and number of prompts a side."""
    examples = measured[0]["ablation"].shape[-1]
    rows: list[dict[str, float | int | str]] = []
    for method in measured[0]:
        for kind, pairs_of in KINDS.items():
            most = examples // 2 if kind == "halves" else examples
            for n in [n for n in (64, 128, 256, 512, 1024, 2048) if n <= most]:
                found = [agreement(*pair) for pair in pairs_of([m[method] for m in measured], n)]
                mean = {name: round(float(np.mean([f[name] for f in found])), 3) for name in found[0]}
                low = round(float(np.quantile([f["rank"] for f in found], 0.05)), 3)
                row = {"method": method, "kind": kind, "n": n, "comparisons": len(found)}
                rows.append({**row, **mean, "rank 5%": low})
    return rows


def main() -> None:
    """Measures, prints the table and writes `stability.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=512, help="prompts of each seed")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--to", type=Path, default=ROOT / "runs" / "stability.json")
    asked = parser.parse_args()
    model, tokenizer = load_model(Base(model=str(PICO))).eval(), load_tokenizer(Base(model=str(PICO)))
    measured = [measure(model, tokenizer, seed, asked.examples, asked.pairs) for seed in range(asked.seeds)]
    rows = table(measured)
    for cells in (list(rows[0]), *(row.values() for row in rows)):
        print(" ".join(f"{cell:>11}" for cell in cells))
    settings = {"examples": asked.examples, "seeds": asked.seeds, "pairs": asked.pairs, "splits": SPLITS}
    asked.to.parent.mkdir(parents=True, exist_ok=True)
    asked.to.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
