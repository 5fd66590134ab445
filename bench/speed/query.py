"""Compare two ways to change heads at the query, at the shape of mamba2-130m: with shared states and with copied ones.

    python -m bench.speed.query [--out FILE] [--quick]

Both score the same variants: every head of a layer ablated, and with both oracle reads. `shared` is what locating does
for these models: one copy of the states for all variants of a prompt, read and not written. `copied` is the way for
choices of several tokens and for other families: every variant decodes from its own copy. It scores four variants of
each layer, since its time is the same for each of them.

The weights are random, the prompts those of recipes/mamba2-130m.yaml. Seconds are CPU time of one thread, the median of
alternating repeats.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM, PreTrainedModel

from bench.common import SHIPPED, load, parser, quiet_on_one_thread
from surgery.data.ranking import ChoiceScores
from surgery.locate import ablation_sweep
from surgery.locate.ablation_sweep import Variant, change_at_query
from surgery.locate.batches import PromptBatches
from surgery.locate.clean_run import CleanRun, run_clean
from surgery.recipe import Locate
from surgery.types import READS, MixerSpec

COPIED = 4  # variants of a layer for the slow way


def random_model(width: int = 768, layers: int = 24, state: int = 128, vocabulary: int = 50288) -> PreTrainedModel:
    """A Mamba-2 of this shape with random weights; mamba2-130m by default."""
    torch.manual_seed(0)
    config = Mamba2Config(
        hidden_size=width, num_hidden_layers=layers, num_heads=width // 32, head_dim=64, state_size=state, n_groups=1,
        vocab_size=vocabulary, pad_token_id=0, bos_token_id=None, eos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    return Mamba2ForCausalLM(config).eval()


def variants_of(spec: MixerSpec) -> list[Variant]:
    """Every head of a mixer ablated, and with each oracle read."""
    reads = [Variant(oracle=((head, position),)) for position in READS for head in spec.heads]
    return [Variant(ablate=(head,)) for head in spec.heads] + reads


def timed(run: CleanRun, variants: Sequence[Variant]) -> tuple[float, list[ChoiceScores]]:
    """CPU seconds for each variant, and the scores."""
    began = time.process_time()
    scores = change_at_query(run, variants)
    return (time.process_time() - began) / len(variants), scores


def compare(run: CleanRun, spec: MixerSpec, repeats: int) -> dict[str, Any]:
    """Time both ways on the variants of one mixer, alternating."""
    variants = variants_of(spec)
    few = list(range(0, len(variants), max(1, len(variants) // COPIED)))[:COPIED]
    shared, copied, apart = [], [], 0.0
    for _ in range(repeats):
        seconds, scores = timed(run, variants)
        shared.append(seconds)
        with mock.patch.object(ablation_sweep, "reading", lambda specs: ()):
            seconds, expected = timed(run, [variants[i] for i in few])
        copied.append(seconds)
        differences = [(scores[i].margin - e.margin).abs().max() for i, e in zip(few, expected, strict=True)]
        apart = max(apart, *(float(x) for x in differences))
    ratios = [c / s for c, s in zip(copied, shared, strict=True)]
    return {
        "layer": spec.layer, "shared": median(shared), "copied": median(copied), "ratio": median(ratios),
        "ratios": ratios, "logits_apart": apart,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line for each measured layer. Exit code 1 if the scores differ by 1e-4 logits or more."""
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="a small model, one repeat: tests the script only")
    options.add_argument("--out", type=Path, help="JSON file for the numbers")
    asked = options.parse_args(arguments)
    quiet_on_one_thread()
    _, tokenizer = load(SHIPPED)
    model = random_model(64, 2, 16, 1024) if asked.quick else random_model()
    section = Locate(methods=("query", "sharpen"), pairs=12, examples=8, batch_size=8)
    batch = PromptBatches(model, tokenizer, section, 0).batches[0]
    run = run_clean(model, batch, stepwise=True)
    layers = range(0, len(run.specs), 1 if asked.quick else 6)
    rows = [compare(run, run.specs[layer], 1 if asked.quick else 3) for layer in layers]
    print(f"{len(batch)} prompts of {batch.input_ids.shape[1]} tokens; CPU milliseconds for a variant of all prompts")
    for row in rows:
        print(f"layer {row['layer']:2}  copied {1e3 * row['copied']:8.1f}  shared {1e3 * row['shared']:8.1f}  "
              f"ratio {row['ratio']:5.1f}  {row['logits_apart']:.1e} logits apart")  # fmt: skip
    if asked.out:
        asked.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["logits_apart"] < 1e-4 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
