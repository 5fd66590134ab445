"""Measure the cost of a hybrid's training step relative to its base, and the saving by shared layers (`make bench`).

    python -m bench.speed.train [--out FILE] [--quick]

First comparison: the shipped base and the shipped hybrid (one spliced head of 32), the same documents, all weights
trainable. Second: one head in the last layer, only the new head trainable with `base_kl`, with and without sharing the
layers below it with the frozen base. Time is CPU seconds of one thread, median over steps that alternate between the
two. Memory is the peak of the tensors that torch holds in forward and backward pass, counted exactly, without weights,
gradients and optimizer state.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from bench.common import SHIPPED, load, parser, quiet_on_one_thread, spliced_at
from surgery.models.loading import load_tokenizer
from surgery.models.meters import Meter
from surgery.recipe import Base, Train
from surgery.train.micro_batches import step_counts
from surgery.train.targets import Targets
from surgery.train.trainer import StageTrainer
from surgery.train.training import make_accelerator
from surgery.types import HeadId, Plan

GOAL = 1.15
KV = {"task": "kv_retrieval", "pairs": (8, 32), "questions": 4, "rows": 32, "weights": {"answer": 1.0}}
KEEP = {"task": "closed_book", "split": 0, "rows": 32, "weights": {"base_kl": 1.0}}


def prepared(model: PreTrainedModel, base: PreTrainedModel, plan: Plan | None, given: dict[str, Any]) -> StageTrainer:
    tokenizer = load_tokenizer(Base(model=str(SHIPPED)))
    section = Train.model_validate({"steps": 1, **given})
    targets = Targets(base=base, grafts=plan.grafts if plan else ())
    trainer = StageTrainer(model, tokenizer, section, 0, make_accelerator(), targets)
    trainer.prepare()
    return trainer


def step(stage: StageTrainer) -> Callable[[], None]:
    """Forward and backward pass over the same documents in every call."""
    accelerator, sources, parts = make_accelerator(), stage.stage.sources, stage.documents(0)
    counts = step_counts(sources, parts, bool(stage.targets.grafts), accelerator)

    def run() -> None:
        for part in parts:
            given = {index: sources[index] for index in part.sources}
            losses = stage.targets.weighted_losses(stage.wrapped, given, part.batch, counts)
            accelerator.backward(torch.stack(list(losses.values())).sum())
        stage.wrapped.zero_grad()

    return run


def seconds(runs: Sequence[Callable[[], None]], rounds: int) -> list[float]:
    """Median CPU seconds of each function, timed alternately."""
    found: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + 1):
        for own, run in zip(found, runs, strict=True):
            began = time.process_time()
            run()
            if number:  # the first is for warming up
                own.append(time.process_time() - began)
    return [median(own) for own in found]


def peak(run: Callable[[], None]) -> int:
    """Peak memory in bytes."""
    with Meter() as meter:
        run()
    return int(meter.peak)


def compare(first: StageTrainer, second: StageTrainer, rounds: int) -> dict[str, Any]:
    runs = [step(first), step(second)]
    one, two = seconds(runs, rounds)
    bytes_one, bytes_two = (peak(run) for run in runs)
    return {
        "seconds": [one, two],
        "bytes": [bytes_one, bytes_two],
        "time_ratio": two / one,
        "memory_ratio": bytes_two / bytes_one,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the ratios. Exit code 1 if a goal is missed."""
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="two rounds: tests the script only")
    options.add_argument("--out", type=Path, help="JSON file for the numbers")
    asked = options.parse_args(arguments)
    quiet_on_one_thread()
    rounds = 2 if asked.quick else 15
    base, _ = load(SHIPPED)
    hybrid, _ = spliced_at(base, HeadId(0, 1))
    everything = {"sources": [KV], "trainable": "all"}
    found = {"hybrid against base": compare(
        prepared(load(SHIPPED)[0], base, None, everything), prepared(hybrid, base, None, everything), rounds
    )}  # fmt: skip
    last = HeadId(base.config.num_hidden_layers - 1, 0)
    (spliced, plan), (other, _) = spliced_at(base, last), spliced_at(base, last)
    only_new = {"sources": [KEEP], "trainable": "new_heads"}
    alone = prepared(other, load(SHIPPED)[0], plan, only_new)
    alone.targets = replace(alone.targets, prefix=None)
    found["shared prefix against none"] = compare(alone, prepared(spliced, base, plan, only_new), rounds)
    for name, row in found.items():
        (a, b), (m, n) = row["seconds"], row["bytes"]
        print(f"{name}: {b:.2f} s of {a:.2f} s a step, {row['time_ratio']:.2f}x; "
              f"{n / 2**20:.0f} MiB of {m / 2**20:.0f} MiB, {row['memory_ratio']:.2f}x")  # fmt: skip
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    row = found["hybrid against base"]
    return 0 if asked.quick or max(row["time_ratio"], row["memory_ratio"]) <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
