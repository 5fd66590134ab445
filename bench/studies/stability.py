"""Repeatability of locating on the shipped pico model: split halves, and different probe seeds.

    python -m bench.studies.stability                       about 20 minutes on one core
    python -m bench.studies.stability --examples 128        fewer prompts for each seed; a few minutes

Each head's ablation margin and oracle-read gain (`sharpen`) is measured on every prompt of several probe seeds. Two
disjoint sets of n prompts give two rankings: random halves of one seed's prompts, or the prompts of two seeds. `rank`
is Spearman's correlation among the candidates (heads whose 95% interval excludes 0 in either set, at least 8). `top k`
is the share of the k best heads of the first set that are among the k best of the second. If fewer than k heads have
an effect, the remaining places are noise, which more prompts do not remove.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.common import RUNS, SHIPPED, load, parser, save
from surgery.data.encoding import encode
from surgery.data.ranking import ChoiceScores
from surgery.locate.ablation_sweep import Variant, ablate, change_at_query
from surgery.locate.clean_run import run_clean
from surgery.models.lookup import family_of
from surgery.probes.documents import rng_of
from surgery.probes.kv_retrieval import kv_document
from surgery.stats import bootstrap_mean
from surgery.types import READS

SPLITS = 40  # random halves of each seed's prompts
TOPS = (1, 8, 10)
AT_LEAST = 8  # candidates
Effects = NDArray[np.float64]  # (R,H,N): logits by column, head, prompt; a head's score is that of its best column


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int, examples: int, pairs: int, size: int = 32
) -> dict[str, Effects]:
    """Margins lost by each head's ablation, (1,H,N), and gained by its oracle reads, (2,H,N)."""
    documents = [kv_document(rng_of("locate", seed, i), pairs, split="eval") for i in range(examples)]
    heads = [head for spec in family_of(model.config).mixers(model.config) for head in spec.heads]
    found: dict[str, list[Effects]] = {"ablation": [], "sharpen": []}
    for start in range(0, examples, size):
        batch = encode(documents[start : start + size], tokenizer, padding_side="left", until_answer=True)
        run = run_clean(model, batch)
        found["ablation"].append(-_change(run.scores, ablate(run, [[h] for h in heads]))[None])
        reads = [_change(run.scores, change_at_query(run, [Variant(oracle=((h, r),)) for h in heads])) for r in READS]
        found["sharpen"].append(np.stack(reads))
    return {method: np.concatenate(parts, axis=-1) for method, parts in found.items()}


def _change(clean: ChoiceScores, changed: Sequence[ChoiceScores]) -> Effects:
    """(heads,N) margins gained by each head's change."""
    return torch.stack([scores.margin - clean.margin for scores in changed]).double().numpy()


def agreement(one: Effects, other: Effects) -> dict[str, float]:
    """`rank`: Spearman's correlation among the candidates; `top K`: overlap of the best; number of `candidates`."""
    scores = np.stack([x.mean(-1).max(0) for x in (one, other)])
    chosen = np.flatnonzero(_excludes_zero(one) | _excludes_zero(other))
    if len(chosen) < AT_LEAST:
        chosen = np.argsort(-scores.mean(0))[:AT_LEAST]
    first, second = (np.argsort(-row).tolist() for row in scores)
    overlaps = {f"top {k}": len({*first[:k]} & {*second[:k]}) / k for k in TOPS}
    return {"rank": float(spearmanr(*scores[:, chosen]).statistic), **overlaps, "candidates": len(chosen)}


def _excludes_zero(effects: Effects) -> NDArray[np.bool_]:
    """(H,) mean effect of each head, in its best column."""
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
    """Pairs of seeds with n prompts each, in blocks with the same prompt numbers."""
    for one, other in combinations(effects, 2):
        for start in range(0, one.shape[-1] - n + 1, n):
            yield one[..., start : start + n], other[..., start : start + n]


KINDS: Mapping[str, Callable[[Sequence[Effects], int], Iterator[tuple[Effects, Effects]]]] = {
    "halves": halves,
    "seeds": probe_seeds,
}


def table(measured: Sequence[Mapping[str, Effects]]) -> list[dict[str, float | int | str]]:
    """Compute one row for each method, kind of comparison and number of prompts per side."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write it to `--out`."""
    options = parser(__doc__)
    options.add_argument("--examples", type=int, default=512, help="prompts for each seed")
    options.add_argument("--seeds", type=int, default=4)
    options.add_argument("--pairs", type=int, default=16)
    options.add_argument("--out", type=Path, default=RUNS / "stability.json")
    args = options.parse_args(arguments)
    model, tokenizer = load(SHIPPED)
    rows = table([measure(model, tokenizer, seed, args.examples, args.pairs) for seed in range(args.seeds)])
    for cells in (list(rows[0]), *(row.values() for row in rows)):
        print(" ".join(f"{cell:>11}" for cell in cells))
    settings = {"examples": args.examples, "seeds": args.seeds, "pairs": args.pairs, "splits": SPLITS}
    save(args.out, {"settings": settings, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
