"""Transfer of heads that were chosen on KV-retrieval to tasks that were not used to choose them.

    python -m bench.studies.transfer                    the shipped base, its heads and its hybrid
    python -m bench.studies.transfer --model ... --heads ... --arm hybrid=... [--examples 256] [--seed 0]
    python -m bench.studies.transfer.arms               trained arms on a base of several formats

For each task and size: the base's accuracy; the margin that each head gains from an oracle read at the query
(docs/LOCATE.md), and the rank of the chosen head by it, in the column it was chosen for and in its better one; the
accuracy of other checkpoints on the same prompts, with exact one-sided McNemar tests against the base in both
directions. Prompts come from the evaluation splits and from seeds that locating does not use. If the base is at chance,
a gain in margin means little: the model may not decode a correct read in a format it never saw.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.common import CHECKPOINTS, FAR, RUNS, load, parser, save
from surgery.data.encoding import encode
from surgery.data.ranking import ChoiceScores, answer_choices
from surgery.errors import PlanError
from surgery.locate.ablation_sweep import Variant, change_at_query
from surgery.locate.clean_run import run_clean
from surgery.models.lookup import family_of, geometry_of
from surgery.probes.documents import Document, rng_of
from surgery.probes.json_kv import UUID
from surgery.probes.knowledge import LETTERS, letter_choice
from surgery.probes.kv_retrieval import kv_document
from surgery.probes.phonebook import Phonebook
from surgery.probes.registry import PROBES, Options, Probe
from surgery.stats import bootstrap_mean, mcnemar, wilson
from surgery.types import READS, HeadSet, Interval, Reads, head_set_from_json

Make = Callable[[Random, int], Document]


@dataclass(frozen=True)
class Task:
    """Documents of one format with `choices` possible answers each."""

    name: str
    choices: int
    documents: Sequence[Document]


def tasks(tokenizer: PreTrainedTokenizerBase, examples: int, seed: int) -> list[Task]:
    """KV-retrieval for comparison, then the tasks that were not used to choose heads."""

    def of(probe: Probe, **more: Any) -> Make:
        return lambda rng, n: probe.document(rng, "eval", Options(pairs=n, tokenizer=tokenizer, **more))

    without_examples = Phonebook()
    without_examples.shots = 0
    makers: list[tuple[str, Make, Sequence[int]]] = [
        ("kv_retrieval", lambda rng, n: kv_document(rng, n, split="eval"), (4, 8, 16)),
        ("phonebook", of(PROBES["phonebook"]), (4, 8, 16)),
        ("phonebook, no examples", of(without_examples), (4, 8, 16)),
        ("json_kv, 4 digits", of(PROBES["json_kv"], groups=(4,)), (4, 8, 16)),
        ("json_kv, uuid", of(PROBES["json_kv"], groups=UUID), (4, 8)),
        ("mqar", lambda rng, n: of(PROBES["mqar"], questions=n)(rng, n), (4, 8, 16)),
        ("letter_choice", lambda rng, n: letter_choice(rng, "eval"), (len(LETTERS),)),
    ]
    return [
        Task(name, n, [make(rng_of("transfer", seed, name, n, i), n) for i in range(examples)])
        for name, make, sizes in makers
        for n in sizes
    ]


@torch.no_grad()
def sharpened(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], batch_size: int
) -> tuple[ChoiceScores, dict[Reads, list[ChoiceScores]]]:
    """Clean scores, and scores of every head's oracle read by column. Heads are in the order of the mixers."""
    heads = [head for spec in family_of(model.config).mixers(model.config) for head in spec.heads]
    clean: list[ChoiceScores] = []
    columns: dict[Reads, list[list[ChoiceScores]]] = {reads: [] for reads in READS}
    for start in range(0, len(documents), batch_size):
        batch = encode(documents[start : start + batch_size], tokenizer, padding_side="left", until_answer=True)
        run = run_clean(model, batch.to(model.device))
        clean.append(run.scores)
        for reads in READS:
            columns[reads].append(change_at_query(run, [Variant(oracle=((head, reads),)) for head in heads]))
    return _joined(clean), {r: [_joined(parts) for parts in zip(*c, strict=True)] for r, c in columns.items()}


def _joined(parts: Sequence[ChoiceScores]) -> ChoiceScores:
    return ChoiceScores(*(torch.cat(values).cpu() for values in zip(*parts, strict=True)))


def _accuracy(correct: torch.Tensor) -> Interval:
    return wilson(int(correct.sum()), len(correct))


def measured(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, chosen: HeadSet, batch_size: int
) -> tuple[dict[str, Any], torch.Tensor]:
    """Measure the base on one task. Returns its row, and its right answers by prompt."""
    heads = [str(head) for spec in family_of(model.config).mixers(model.config) for head in spec.heads]
    clean, columns = sharpened(model, tokenizer, task.documents, batch_size)
    gains = {
        reads: bootstrap_mean(np.stack([(s.margin - clean.margin).double().numpy() for s in scores]), chosen.seed)
        for reads, scores in columns.items()
    }
    of_head: dict[str, dict[Reads, dict[str, float]]] = {
        head: {r: {**vars(gains[r][i]), "accuracy": _accuracy(columns[r][i].correct).value} for r in READS}
        for i, head in enumerate(heads)
    }
    base = _accuracy(clean.correct)
    found = {
        "task": task.name,
        "choices": task.choices,
        "base": vars(base),
        "margin": float(clean.margin.mean()),
        "at_chance": base.low <= 1 / task.choices,
        "chosen": [standing(str(s.head), s.reads, of_head) for s in chosen.chosen],
        "heads": of_head,
    }
    return found, clean.correct


def standing(
    head: str, reads: Reads | None, of_head: Mapping[str, Mapping[Reads, Mapping[str, float]]]
) -> dict[str, Any]:
    """Rank a chosen head among all other heads, by their better column on this task.

    `rank` uses the column for which the head was chosen, if any. `rank_better` uses the head's better column here.
    """
    better = {name: max(column["value"] for column in columns.values()) for name, columns in of_head.items()}
    others = [value for name, value in better.items() if name != head]
    own = better[head] if reads is None else of_head[head][reads]["value"]
    rank, rank_better = (1 + sum(other > value for other in others) for value in (own, better[head]))
    return {"head": head, "reads": reads, "rank": rank, "rank_better": rank_better, "of": len(of_head)}


def compared(
    arms: Mapping[str, PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    base: torch.Tensor,
    batch_size: int,
) -> dict[str, Any]:
    """Evaluate other checkpoints on the same prompts, with one-sided McNemar tests against the base."""
    found = {}
    for name, model in arms.items():
        correct = answer_choices(model, tokenizer, task.documents, batch_size).correct
        after, before = correct.numpy().astype(bool), base.numpy().astype(bool)
        better, worse = mcnemar(after, before), mcnemar(before, after)
        found[name] = {**vars(_accuracy(correct)), "p_better": better, "p_worse": worse}
    return found


def line(row: Mapping[str, Any]) -> str:
    """Format one row of the table."""
    found = [f"{row['task']:<22} {row['choices']:>3}  {row['base']['value']:.3f}{'*' if row['at_chance'] else ' '}"]
    for chosen in row["chosen"]:
        found.append(f"{chosen['head']} ranks {chosen['rank']}, {chosen['rank_better']} of {chosen['of']}")
        for reads, gain in row["heads"][chosen["head"]].items():
            interval = f"[{gain['low']:+.2f}, {gain['high']:+.2f}]"
            found.append(f"{reads} {gain['value']:+.2f} {interval} acc {gain['accuracy']:.3f}")
    for name, arm in row["arms"].items():
        found.append(f"{name} {arm['value']:.3f} (p better {arm['p_better']:.1e}, worse {arm['p_worse']:.1e})")
    return "  ".join(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one row for each task as it is measured, and write all heads' gains to `--out`."""
    options = parser(__doc__)
    options.add_argument("--model", default=str(FAR))
    options.add_argument("--heads", type=Path, default=CHECKPOINTS / "quickstart" / "heads.json")
    options.add_argument("--arm", action="append", metavar="NAME=MODEL", help="the shipped hybrid by default")
    options.add_argument("--examples", type=int, default=256)
    options.add_argument("--batch-size", type=int, default=32)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, default=RUNS / "transfer.json")
    args = options.parse_args(arguments)
    model, tokenizer = load(args.model)
    chosen = head_set_from_json(json.loads(args.heads.read_text()))
    if chosen.geometry != geometry_of(model.config):
        raise PlanError(
            "--heads", str(args.heads), "They were located in another model. Pass the heads.json of this model."
        )
    named = dict(arm.split("=", 1) for arm in args.arm or [f"hybrid={CHECKPOINTS / 'quickstart' / 'export'}"])
    arms = {name: load(path)[0] for name, path in named.items()}
    rows = []
    print(
        "*: the base is at chance; acc: accuracy with that oracle read; ranks: by the chosen column, by the better one"
    )
    for task in tasks(tokenizer, args.examples, args.seed):
        row, correct = measured(model, tokenizer, task, chosen, args.batch_size)
        rows.append({**row, "arms": compared(arms, tokenizer, task, correct, args.batch_size)})
        print(line(rows[-1]), flush=True)
    save(args.out, {"examples": args.examples, "seed": args.seed, "rows": rows})
    return 0
