"""False positives of locating: heads that get a role in random models, with shuffled labels, with redrawn answers.

    python -m bench.studies.null                  40 seeds of each kind
    python -m bench.studies.null --seeds 200

A false positive is a head whose role is not "neither". The tests control the family-wise error at 0.05, so at most one
seed in twenty should have any; a correct procedure exceeds `allowed` in 3 runs of 200.

With shuffled labels the gold choice is drawn at random among the choices of the prompt: ablating a head then loses as
many correct answers as it gains. Most heads of a small model change few answers, which makes the exact test
conservative; in `redrawn`, ablating any head changes all of them. `surgery locate` itself refuses such models.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from bench.common import RUNS, parser, save
from surgery.data.encoding import EncodedBatch
from surgery.locate.scores import Record, Table, roles_of
from surgery.types import Role
from tests.support.pico import pico_base
from tests.support.planted import plant, planted_prompts, planted_tokenizer, scored_heads

LEVEL = 0.05
EXAMPLES = 48


def random_model(seed: int, examples: int) -> tuple[PreTrainedModel, EncodedBatch]:
    """A model with random weights, and the usual prompts."""
    return pico_base(seed, vocab_size=len(planted_tokenizer())), planted_prompts(seed, examples)


def shuffled_labels(seed: int, examples: int) -> tuple[PreTrainedModel, EncodedBatch]:
    """A model with planted heads, and prompts whose correct answer is drawn at random."""
    batch = planted_prompts(seed, examples)
    rng = torch.Generator().manual_seed(seed)
    gold = torch.randint(batch.choice_ids.shape[-1], batch.gold.shape, generator=rng)
    target = batch.choice_ids.gather(-1, gold[..., None])[..., 0]
    return plant(seed).model, replace(batch, gold=gold, target=target)


def redrawn(seed: int, examples: int) -> list[Role]:
    """Roles of 16 simulated heads whose ablation redraws all answers. This case needs the correction most."""
    right = np.random.default_rng(seed).random((2, 16, examples)) < 1 / 5
    clean = np.random.default_rng((seed, 1)).random(examples) < 1 / 5
    lead, after = clean - 1 / 5, right - 1 / 5
    columns = {
        name: np.stack([right[i] * 2.0 - 1, right[i], after[i]], 1) for i, name in enumerate(("query", "context"))
    }
    table = Table([Record(0, np.stack([clean * 2.0 - 1, clean, lead]), columns)])
    return roles_of(table, 16)


KINDS = ("random", "shuffled", "redrawn")


def calls(kind: str, seed: int, examples: int = EXAMPLES) -> list[str]:
    """Count the roles other than "neither" for one seed, which are all false positives."""
    if kind == "redrawn":
        roles = redrawn(seed, examples)
    else:
        model, batch = (random_model if kind == "random" else shuffled_labels)(seed, examples)
        roles = [s.role for s in scored_heads(model, [batch], seed, methods=("query", "context"))]
    return [role for role in roles if role != "neither"]


def allowed(seeds: int, level: float = LEVEL, risk: float = 0.015) -> int:
    """Smallest number of false positives that a test at `level` exceeds with probability at most `risk`."""
    tail, called = 1.0, -1
    while tail > risk:
        called += 1
        tail -= math.comb(seeds, called) * level**called * (1 - level) ** (seeds - called)
    return called


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the counts and write them to `--out`."""
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=40)
    options.add_argument("--examples", type=int, default=EXAMPLES, help="prompts for each seed")
    options.add_argument("--kind", choices=KINDS, action="append", help="run this kind only; repeatable")
    options.add_argument("--out", type=Path, default=RUNS / "null.json")
    args = options.parse_args(arguments)
    counts = {}
    for kind in args.kind or KINDS:
        roles = {seed: calls(kind, seed, args.examples) for seed in range(args.seeds)}
        which = {seed: heads for seed, heads in roles.items() if heads}
        counts[kind] = {"examples": args.examples, "seeds": args.seeds, "called": len(which), "which": which}
        print(f"{kind:>9}: {len(which)} of {args.seeds} seeds have a false positive; "
              f"at most {allowed(args.seeds)} expected", flush=True)  # fmt: skip
    save(args.out, counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
