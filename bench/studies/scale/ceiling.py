"""What a perfect read would bring, without training: answers of the base whose heads read the gold token alone.

    python -m bench.studies.scale.ceiling BASE --heads heads.json --pairs 100 --prompts 64
    python -m bench.studies.scale.ceiling BASE --heads heads.json --pairs 100 --prompts 64 --first 1 2 4

Every prompt is answered with an oracle read of each of the best heads, alone and together with one fixed head; or, with
`--first`, of the heads that each ranking puts first. The base's weights stay, so this is what a spliced head can reach
if its attention is right and nothing else learns.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from bench.common import load, markdown_table, parser, quiet_on_one_thread
from surgery.data.ranking import query_batches
from surgery.files.atomic import read_json
from surgery.locate.ablation_sweep import Variant, change_at_query
from surgery.locate.clean_run import run_clean
from surgery.models.torch_scans import torch_scans
from surgery.probes.documents import rng_of
from surgery.probes.registry import PROBES, Options
from surgery.types import READS, HeadId, HeadSet, Reads, head_set_from_json

Read = tuple[HeadId, Reads]
RANKED_BY = ("patching", "query", "ablation", "context")


def candidates(heads: HeadSet, count: int) -> list[Read]:
    """The reads that gained most where the heads were located."""
    gains = {(head.head, reads): head.scores[reads].value for head in heads.heads for reads in READS}
    return sorted(gains, key=lambda read: -gains[read])[:count]


def variants_of(reads: Sequence[Read]) -> dict[str, Variant]:
    """No read, each one alone, and each with the first one."""
    first, *others = reads
    named = {f"{head} ({place})": Variant(oracle=((head, place),)) for head, place in reads}
    pairs = {f"{first[0]} and {head} ({place})": Variant(oracle=(first, (head, place))) for head, place in others}
    return {"the base": Variant(), **named, **pairs}


def variants_by_ranking(heads: HeadSet, counts: Sequence[int]) -> dict[str, Variant]:
    """No read, and the first heads of each ranking of the file, each at the position that it reads."""
    measured = [name for name in RANKED_BY if name in heads.heads[0].scores]
    scores = {name: [head.scores[name].value for head in heads.heads] for name in measured}
    scores["largest gain by reading"] = [max(head.scores[reads].value for reads in READS) for head in heads.heads]
    scores |= {f"random {seed}": np.random.default_rng(seed).random(len(heads.heads)).tolist() for seed in range(3)}
    variants = {"the base": Variant()}
    for ranking, values in scores.items():
        order = np.argsort(np.negative(values), kind="stable")
        for count in counts:
            reads = tuple((heads.heads[i].head, heads.heads[i].reads) for i in order[:count])
            variants[f"{ranking}: {' '.join(str(head) for head, _ in reads)}"] = Variant(oracle=reads)
    return variants


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("base", type=Path)
    options.add_argument("--heads", type=Path, required=True, help="located heads of the base")
    options.add_argument("--pairs", type=int, default=100)
    options.add_argument("--filler", type=int, nargs=2, default=(0, 20), metavar=("LOW", "HIGH"))
    options.add_argument("--prompts", type=int, default=64)
    options.add_argument("--reads", type=int, default=12, help="reads to try")
    options.add_argument("--first", type=int, nargs="+", help="numbers of heads to take from each ranking")
    args = options.parse_args(arguments)
    quiet_on_one_thread()
    base, tokenizer = load(args.base)
    sizes = Options(pairs=args.pairs, questions=1, filler=tuple(args.filler), tokenizer=tokenizer)
    probe, heads = PROBES["kv_retrieval"], head_set_from_json(read_json(args.heads))
    prompts = [probe.generate(rng_of("ceiling", i), "eval", sizes) for i in range(args.prompts)]
    tried = variants_by_ranking(heads, args.first) if args.first else variants_of(candidates(heads, args.reads))
    margins: dict[str, list[float]] = defaultdict(list)
    with torch.no_grad(), torch_scans(base):
        for batch in query_batches(prompts, tokenizer, 4):
            changed = change_at_query(run_clean(base, batch, stepwise=True), list(tried.values()))
            for name, scores in zip(tried, changed, strict=True):
                margins[name] += scores.margin.tolist()
    clean = np.array(margins["the base"])
    rows = []
    for name, values in sorted(margins.items(), key=lambda item: -(np.array(item[1]) > 0).mean()):
        right, gain = np.array(values) > 0, np.array(values) - clean
        shares = (right.mean(), right[clean <= 0].mean(), right[clean > 0].mean())
        rows.append([name, *(f"{share:.3f}" for share in shares), f"{gain.mean():+.2f}"])
    print(markdown_table(["read", "right", "of those it failed", "of those it answered", "margin"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
