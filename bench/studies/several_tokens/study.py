"""Supervise a new head at every token of an answer, at the first alone, or not at all. Values have three tokens.

One attention head is spliced at L0H1 of checkpoints/pico-mamba2. All weights train on lines of the user's data: a
dictionary of 8 pairs, a question, and the span of the answer. The table has, on other lines, the attention loss at each
answer token, and the shares of lines whose first token and whole answer are generated.

Shape legend: B documents, R reads (one for each answer token).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.common import SHIPPED, load, parser, quiet_on_one_thread, spliced_at
from surgery.data.encoding import EncodedBatch, encode
from surgery.data.generation import exact_answers
from surgery.data.user import read_documents
from surgery.probes.documents import Document, Split
from surgery.probes.words import key_words
from surgery.recipe import Data, Source, Train
from surgery.recipe.objectives import OBJECTIVES
from surgery.train.micro_batches import Counts
from surgery.train.targets import Targets
from surgery.train.trainer import StageTrainer
from surgery.train.training import make_accelerator
from surgery.types import HeadId

ARMS = ("nothing", "first token", "every token")
PAIRS, ROWS, TOKENS = 8, 16, 3


def line(rng: Random, tokenizer: PreTrainedTokenizerBase, split: Split) -> dict[str, Any]:
    """A dictionary whose values have three tokens, a question, its answer, and the span of the answer."""
    keys, values = rng.sample(key_words(split), PAIRS), list[str]()
    while len(values) < PAIRS:
        value = str(rng.randrange(10**5, 10**6))
        if len(tokenizer.encode(value, add_special_tokens=False)) == TOKENS:
            values.append(value)
    prompt, asked = "Memorize the following dictionary:\n", rng.randrange(PAIRS)
    span = [0, 0]
    for key, value in zip(keys, values, strict=True):
        prompt += f"{key}:"
        if key == keys[asked]:
            span = [len(prompt), len(prompt) + len(value)]
        prompt += f"{value}\n"
    return {"prompt": f"{prompt}The value of the key '{keys[asked]}' is", "answer": values[asked], "span": span}


def data_of(path: Path, lines: list[dict[str, Any]]) -> Data:
    """Write lines as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    return Data.model_validate({"path": str(path), "columns": {"answer_span": "span"}})


@dataclass(frozen=True)
class FirstTokens(Targets):
    """Losses of the library, with attention supervision of the first token of each answer alone."""

    def weighted_losses(
        self,
        model: torch.nn.Module,
        sources: Mapping[int, Source],
        batch: EncodedBatch,
        counts: Counts,
        progress: float = 0.5,
        rows: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Losses without the reads of later tokens, divided by the terms that are left."""
        first = replace(batch, read_query=None, read_segment_end=None, read_answer_token=None)
        left = {(index, name): OBJECTIVES[name].count(first) for index, name in counts}
        return super().weighted_losses(model, sources, first, left, progress, rows)


def run_arm(arm: str, options: argparse.Namespace, data: Data, held_out: list[Document]) -> list[float]:
    """Splice, train and measure: losses by answer token, and the shares of right first tokens and answers."""
    base, tokenizer = load(SHIPPED)
    model, plan = spliced_at(base, HeadId(0, 1), options.reads)
    weights = {"answer": 1.0, **({} if arm == "nothing" else {"attention": 1.0})}
    section = Train.model_validate(
        {
            "steps": options.steps,
            "sources": [{"data": data.model_dump(), "rows": ROWS, "weights": weights}],
            "optimizer": {"lr": 2e-3, "new_heads_lr": 6e-3, "warmup": 10},
        }
    )
    targets = (FirstTokens if arm == "first token" else Targets)(grafts=plan.grafts)
    StageTrainer(model, tokenizer, section, options.seed, make_accelerator(), targets).run()
    answers = exact_answers(model, tokenizer, held_out, 64)
    shares = [float(x.double().mean()) for x in (answers.first_token, answers.correct)]
    return [*losses_by_token(model, encode(held_out, tokenizer), options.reads), *shares]


@torch.no_grad()
def losses_by_token(model: PreTrainedModel, batch: EncodedBatch, reads: str) -> list[float]:
    """Mean of -log of the new head's attention at the gold position, for each token of the answers."""
    arguments = {"attention_mask": batch.attention_mask, "use_cache": False, "splice_queries": batch.read_query}
    (rows_BHRT,) = model(batch.input_ids, **arguments).splice_attentions
    mass_BR = rows_BHRT[:, 0].gather(-1, getattr(batch, f"read_{reads}")[..., None])[..., 0]
    losses: list[float] = (-mass_BR.clamp(min=1e-9).log()).mean(0).tolist()
    return losses


def main() -> int:
    """Parse the command line, run the arms and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=60)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--prompts", type=int, default=200)
    arguments.add_argument("--reads", choices=("answer_token", "segment_end"), default="answer_token")
    options = arguments.parse_args()
    quiet_on_one_thread()
    _, tokenizer = load(SHIPPED)
    rng = Random(options.seed)
    print("| supervised | loss at token 1 | 2 | 3 | first token | whole answer |\n|---|---|---|---|---|---|")
    with TemporaryDirectory() as folder:
        trained = [line(rng, tokenizer, "train") for _ in range(options.steps * ROWS)]
        others = [line(rng, tokenizer, "eval") for _ in range(options.prompts)]
        data = data_of(Path(folder) / "lines.jsonl", trained)
        held_out, _ = read_documents(data_of(Path(folder) / "held_out.jsonl", others), tokenizer)
        for arm in ARMS:
            numbers = run_arm(arm, options, data, held_out)
            print(f"| {arm} | {' | '.join(f'{x:.3f}' for x in numbers)} |", flush=True)
    return 0
