"""Compare the speed of locating with the procedure of the paper's notebook, on one machine (`make bench`).

    python -m bench.speed.locate [--out FILE] [--quick]

The notebook's procedure, for every head: zero the head's weights, run every prompt once for each answer choice (prompt
and choice together, scored by the choice's log-likelihood), restore the weights. Ours, on the same prompts and heads:

- `exact`: ablate every head at every token, exactly, and rank by the same accuracy and margin;
- `query`: ablate every head at the query only.

The notebook's procedure runs on the first few prompts, and its time is multiplied: its batches are independent. On the
pico model it runs for every head, and the rankings on those prompts are compared. On the random model of 24 layers x 24
heads it runs for two heads, and its time is multiplied: the work does not depend on the head. Seconds are CPU time of
one thread; compare the ratios. Memory is the peak of the process so far.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from bench.common import SHIPPED, load, parser, quiet_on_one_thread
from surgery.data.encoding import EncodedBatch
from surgery.locate.batches import PromptBatches
from surgery.locate.locating import locate_heads, peak_bytes
from surgery.models.lookup import family_of, mixer_of, structure_of
from surgery.recipe import Locate, Splice
from surgery.types import HeadId, MixerSpec

SEED, PAIRS = 0, 48
GOALS = {"exact": 40, "query": 1000}


@torch.no_grad()
def notebook(model: PreTrainedModel, batches: Sequence[EncodedBatch], spec: MixerSpec, head: int) -> np.ndarray:
    """(N,) margins in log-likelihood of the gold choice, with the head's columns of `out_proj` set to zero."""
    out_proj = structure_of(spec).out_proj(mixer_of(model, spec))
    columns = structure_of(spec).weight_slices(spec, head).out
    kept = out_proj.weight[:, columns].clone()
    out_proj.weight[:, columns] = 0
    try:
        return np.concatenate([_margins(model, batch) for batch in batches])
    finally:
        out_proj.weight[:, columns] = kept


def _margins(model: PreTrainedModel, batch: EncodedBatch) -> np.ndarray:
    """One forward pass of the whole prompt for each choice."""
    scores = []
    for choice in range(batch.choice_ids.shape[-1]):
        token = batch.choice_ids[:, -1, choice].clamp(min=0)
        ids = torch.cat([batch.input_ids, token[:, None]], 1)
        mask = torch.cat([batch.attention_mask, torch.ones_like(token)[:, None]], 1)
        logits = model(ids, attention_mask=mask, use_cache=False).logits
        likelihood = logits[:, -2].log_softmax(-1).gather(1, token[:, None])[:, 0]
        scores.append(torch.where(batch.choice_ids[:, -1, choice] >= 0, likelihood, -torch.inf))
    scores_BK, gold = torch.stack(scores, 1), batch.gold[:, -1:]
    best_other = scores_BK.scatter(1, gold, -torch.inf).amax(1)
    return (scores_BK.gather(1, gold)[:, 0] - best_other).double().numpy()


def ways(section: Locate) -> dict[str, tuple[Locate, Splice]]:
    """Settings of the fast procedures."""

    def only(method: str) -> Locate:
        return Locate.model_validate({**section.model_dump(), "methods": (method,)})

    return {
        "exact": (only("ablation"), Splice(select="ablation")),
        "query": (only("query"), Splice(select="aggregate")),
    }


def compare(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    section: Locate,
    few: int,
    whole: bool,
) -> dict[str, Any]:
    """Time both procedures, the notebook's on the first `few` prompts. `whole`: run it for all heads, not for two."""
    specs = family_of(model.config).mixers(model.config)
    heads = [head for spec in specs for head in spec.heads]
    asked = heads if whole else [specs[0].heads[0], specs[-1].heads[-1]]
    first = section.model_copy(update={"examples": few, "batch_size": few})
    batches = PromptBatches(model, tokenizer, first, SEED).batches
    by_name = {spec.name: spec for spec in specs}
    notebook(model, batches, specs[0], 0) if whole else None  # warm
    began = time.process_time()
    slow = {head: notebook(model, batches, by_name[head.mixer], head.head) for head in asked}
    seconds = (time.process_time() - began) * len(heads) / len(asked) * section.examples / few
    found: dict[str, Any] = {
        "model": name,
        "heads": len(heads),
        "notebook_heads": len(asked),
        "notebook_prompts": few,
        "prompts": section.examples,
        "pairs": section.pairs,
        "tokens": batches[0].input_ids.shape[1],
        "notebook": {"seconds": seconds, "passes": float(len(heads) * section.pairs * section.examples)},
    }
    for way, (own, splice) in ways(section).items():
        began = time.process_time()
        result = locate_heads(model, tokenizer, own, splice, SEED, any_accuracy=True)
        took = time.process_time() - began
        found[way] = {"seconds": took, "ratio": seconds / took, "passes": result.cost["passes"]}
        found[way]["best"] = str(result.heads[0].head)
    own, splice = ways(first)["exact"]
    exact = locate_heads(model, tokenizer, own, splice, SEED, any_accuracy=True)
    found["same_ranking"] = _same(slow, {s.head: s.scores["ablation"].value for s in exact.heads})
    found["peak_gib"] = peak_bytes(model.device) / 2**30
    return found


def _same(slow: dict[HeadId, np.ndarray], losses: dict[HeadId, float]) -> bool:
    """True if both rankings are equal. Heads that differ by less than 1e-4 logits, by rounding, may change places."""
    order = sorted(slow, key=lambda head: slow[head].mean())
    values = [losses[head] for head in order]
    return all(a >= b - 1e-4 for a, b in pairwise(values))


def random_model(tokenizer: PreTrainedTokenizerBase, layers: int = 24) -> PreTrainedModel:
    """Random model with layers of 24 heads, a small width, and the tokenizer's vocabulary."""
    torch.manual_seed(0)
    config = Mamba2Config(
        hidden_size=48, num_hidden_layers=layers, num_heads=24, head_dim=4, state_size=8, n_groups=1, expand=2,
        vocab_size=len(tokenizer), chunk_size=32, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Mamba2ForCausalLM(config).eval()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line for each procedure. Exit code 1 if a goal is missed."""
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="few prompts, 2 layers: tests the script only")
    options.add_argument("--out", type=Path, help="JSON file for the numbers")
    asked = options.parse_args(arguments)
    quiet_on_one_thread()
    model, tokenizer = load(SHIPPED)
    pairs = 4 if asked.quick else PAIRS
    section = Locate(pairs=pairs, examples=8 if asked.quick else 128, batch_size=8 if asked.quick else 32)
    found = [compare("pico-mamba2", model, tokenizer, section, 8, True)]
    layers, few = (2, 4) if asked.quick else (24, 8)
    section = section.model_copy(update={"examples": few, "batch_size": few})
    found.append(compare(f"random {layers} x 24", random_model(tokenizer, layers), tokenizer, section, few, False))
    for row in found:
        print(f"{row['model']}: {row['heads']} heads, {row['prompts']} prompts of {row['tokens']} tokens, "
              f"{row['pairs']} choices; peak memory {row['peak_gib']:.2f} GiB")  # fmt: skip
        print(f"  notebook  {row['notebook']['seconds']:9.1f} s  {row['notebook']['passes']:12.0f} passes")
        for way, goal in GOALS.items():
            own = row[way]
            print(
                f"  {way:8}  {own['seconds']:9.1f} s  {own['passes']:12.0f} passes  {own['ratio']:7.0f}x (goal {goal}x)"
            )
        print(f"  same ranking: {row['same_ranking']}; best head {row['exact']['best']}")
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    missed = [w for row in found for w, goal in GOALS.items() if row[w]["ratio"] < goal]
    return 0 if asked.quick or not missed else 1


if __name__ == "__main__":
    sys.exit(main())
