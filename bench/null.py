"""How often is a head called where there is nothing to find? Random models, shuffled labels, redrawn answers.

    python -m bench.null                  40 seeds of each kind (from the repository's root)
    python -m bench.null --seeds 200

A head is called if its role is not "neither". The tests are corrected for a family-wise error of 0.05, so at most one
seed in twenty may call any head; `allowed` is what a right instrument exceeds in 3 runs of 200.

With shuffled labels the gold choice is drawn at random among the choices of the prompt, so whatever a head does, its
removal loses as many right answers as it wins. Most heads of a small model change few answers, and the exact test is
conservative then; `redrawn` is the case in which every head's removal changes all of them. `locate` itself refuses
such models; this asks what it would say.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from surgery.data.encoding import EncodedBatch
from surgery.locate.locating import roles_of
from surgery.locate.scores import Record, Table
from surgery.types import Role
from tests.support.pico import pico_base
from tests.support.planted import plant, planted_prompts, planted_tokenizer, scored_heads

ROOT = Path(__file__).parents[1]
LEVEL = 0.05
EXAMPLES = 48


def random_model(seed: int, examples: int) -> tuple[PreTrainedModel, EncodedBatch]:
    """Random weights, real prompts."""
    return pico_base(seed, vocab_size=len(planted_tokenizer())), planted_prompts(seed, examples)


def shuffled_labels(seed: int, examples: int) -> tuple[PreTrainedModel, EncodedBatch]:
    """A model with planted heads, and prompts whose right answer is drawn at random."""
    batch = planted_prompts(seed, examples)
    rng = torch.Generator().manual_seed(seed)
    gold = torch.randint(batch.choice_ids.shape[-1], batch.gold.shape, generator=rng)
    target = batch.choice_ids.gather(-1, gold[..., None])[..., 0]
    return plant(seed).model, replace(batch, gold=gold, target=target)


def redrawn(seed: int, examples: int) -> list[Role]:
    """No model: 16 heads whose removal, at any position, draws all answers anew. The hardest case for the tests."""
    right = np.random.default_rng(seed).random((2, 16, examples)) < 1 / 5
    clean = np.random.default_rng((seed, 1)).random(examples) < 1 / 5
    columns = {name: np.stack([right[i] * 2.0 - 1, right[i]], 1) for i, name in enumerate(("query", "context"))}
    table = Table([Record(0, np.stack([clean * 2.0 - 1, clean]), columns)])
    return roles_of(table, range(16), 16)


KINDS = ("random", "shuffled", "redrawn")


def calls(kind: str, seed: int, examples: int = EXAMPLES) -> list[str]:
    """The roles that are called for one seed."""
    if kind == "redrawn":
        roles = redrawn(seed, examples)
    else:
        model, batch = (random_model if kind == "random" else shuffled_labels)(seed, examples)
        roles = [s.role for s in scored_heads(model, [batch], seed, methods=("query", "context"))]
    return [role for role in roles if role != "neither"]


def allowed(seeds: int, level: float = LEVEL, risk: float = 0.015) -> int:
    """The smallest number of seeds that a test of exactly this level exceeds with a chance of `risk` at most."""
    tail, called = 1.0, -1
    while tail > risk:
        called += 1
        tail -= math.comb(seeds, called) * level**called * (1 - level) ** (seeds - called)
    return called


def main() -> None:
    """Prints the counts and writes `null.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="prompts of each seed")
    parser.add_argument("--kind", choices=[*KINDS], action="append", help="one of them; again for another")
    parser.add_argument("--to", type=Path, default=ROOT / "runs" / "null.json")
    asked = parser.parse_args()
    found = {}
    for kind in asked.kind or KINDS:
        by_seed = {seed: calls(kind, seed, asked.examples) for seed in range(asked.seeds)}
        which = {seed: heads for seed, heads in by_seed.items() if heads}
        found[kind] = {"examples": asked.examples, "seeds": asked.seeds, "called": len(which), "which": which}
        limit = allowed(asked.seeds)
        print(f"{kind:>9}: {len(which)} of {asked.seeds} seeds call a head; {limit} are allowed", flush=True)
    asked.to.parent.mkdir(parents=True, exist_ok=True)
    asked.to.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
