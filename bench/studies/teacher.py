"""Effect of a teacher: the same splice and steps with and without distillation from a small Transformer.

    python -m bench.studies.teacher               run the arms that have no result, then print the table
    python -m bench.studies.teacher --table       print the table of the arms in runs/distil/

The base is checkpoints/pico-mamba2, the site that of the committed example, the teacher checkpoints/pico-transformer.
Each arm is one file, runs/distil/NAME_STEPS_seedN.json. All arms take an hour on one core.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.common import (
    RUNS,
    SHIPPED,
    TRANSFORMER,
    accuracy_cell,
    as_digits,
    load,
    markdown_table,
    parser,
    quiet_on_one_thread,
    save,
    share,
    spliced_at,
)
from bench.studies.experiment import in_short_chunks
from bench.studies.site_selection.arms import Budget
from surgery.data.encoding import encode
from surgery.data.ranking import answer_choices
from surgery.files.atomic import read_json
from surgery.probes.documents import rng_of
from surgery.probes.kv_retrieval import kv_document
from surgery.recipe import Train, Weights
from surgery.recipe.objectives import OBJECTIVES
from surgery.run.evaluate_stage import versions
from surgery.stats import mcnemar
from surgery.train.training import train_model
from surgery.types import HeadId

# The site reads the value itself. The teacher's retrieval head reads the end of its line, one token later.
SITE, OFFSET = "L0H1", -1
PAIRS, EXAMPLES, PROMPTS_SEED = (16, 32, 64), 200, 950
# Objectives on the documents with answers. With `gold`, training uses the position of the value.
ARMS: dict[str, dict[str, float]] = {
    "answers": {"answer": 1.0},
    "answers, teacher's logits": {"answer": 1.0, "distil": 1.0},
    "teacher's logits alone": {"distil": 1.0},
    "answers, teacher's matrices": {"answer": 1.0, "attention_mse": 10.0},
    "answers, teacher's reading": {"answer": 1.0, "attention_kl": 1.0},
    "answers, teacher's reading and logits": {"answer": 1.0, "attention_kl": 1.0, "distil": 1.0},
    "teacher's reading and logits alone": {"attention_kl": 1.0, "distil": 1.0},
    "answers, gold attention": {"answer": 1.0, "attention": 1.0},
    "answers, gold attention, teacher's logits": {"answer": 1.0, "attention": 1.0, "distil": 1.0},
}
STEPS, SEEDS = (100, 50), (0, 1, 2)


def section(weights: dict[str, float], steps: int, teacher: Path, head: str) -> Train:
    """Training settings of the site selection study, with these objectives on the dictionaries."""
    given = Budget(steps=steps).train(attention=True).model_dump()
    given["sources"][0]["weights"] = Weights.model_validate(weights).model_dump()
    if any(OBJECTIVES[name].needs_teacher for name in weights):
        given |= {
            "teacher": {"model": str(teacher)},
            "align": {"heads": {SITE: head}, "offsets": {SITE: OFFSET}},
        }
    return Train.model_validate(given)


@torch.no_grad()
def reading_head(teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[str, float]:
    """Find the teacher's head whose query attends most to the gold segment (`key:value` and its end), and its share."""
    prompts = [kv_document(rng_of("distil", "teacher", i), 24, split="eval") for i in range(64)]
    batch = encode(prompts, tokenizer, until_answer=True, padding_side="left")
    teacher.set_attn_implementation("eager")
    output = teacher.eval()(batch.input_ids, attention_mask=batch.attention_mask, output_attentions=True)
    place_T = torch.arange(batch.input_ids.shape[1])
    gold_BT = (place_T >= batch.segment_start[:, :1]) & (place_T <= batch.segment_end[:, :1])
    shares_LH = torch.stack([(rows[:, :, -1] * gold_BT[:, None]).sum(-1).mean(0) for rows in output.attentions])
    layer, head = divmod(int(shares_LH.argmax()), shares_LH.shape[1])
    return str(HeadId(layer, head)), float(shares_LH.max())


def scored(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Correct and wrong answers, as `1` and `0`, on the prompts that all arms share."""
    found = {}
    for pairs in PAIRS:
        asked = [kv_document(rng_of("distil", PROMPTS_SEED, pairs, i), pairs, split="eval") for i in range(EXAMPLES)]
        right = answer_choices(model.eval(), tokenizer, asked, 50).correct
        found[str(pairs)] = as_digits(right)
    return found


def run(folder: Path, base_folder: Path, teacher_folder: Path) -> None:
    """Run every arm that has no result."""
    base, tokenizer = load(base_folder)
    base = in_short_chunks(base)
    teacher, _ = load(teacher_folder)
    head, attended = reading_head(teacher, tokenizer)
    for name, model in (("base", base), ("teacher", teacher)):
        save(folder / f"{name}.json", {"correct": scored(model, tokenizer), "head": head, "share": attended})
    for steps in STEPS:
        for seed in SEEDS:
            for name, weights in {"no splice": {"answer": 1.0}, **ARMS}.items():
                path = folder / f"{name}_{steps}_seed{seed}.json"
                if path.is_file():
                    continue
                began = time.perf_counter()
                none = name == "no splice"
                model, plan = (copy.deepcopy(base), None) if none else spliced_at(base, HeadId.parse(SITE), seed=seed)
                train_model(model, tokenizer, section(weights, steps, teacher_folder, head), plan, base, seed)
                seconds = round(time.perf_counter() - began, 1)
                result = {"correct": scored(model, tokenizer), "seconds": seconds}
                save(path, {"arm": name, "steps": steps, "seed": seed, "weights": weights, **result})
                shares = {k: round(share(v), 3) for k, v in result["correct"].items()}
                print(name, steps, seed, shares, seconds, flush=True)


def table(folder: Path) -> str:
    """Accuracy by arm, pooled over seeds; `*`: differs from the arm without a teacher (exact McNemar, two-sided)."""
    found: dict[tuple[str, int], dict[int, dict[str, str]]] = {}
    for path in sorted(folder.glob("*_seed*.json")):
        result = read_json(path)
        found.setdefault((result["arm"], result["steps"]), {})[result["seed"]] = result["correct"]
    rows: list[list[str]] = []
    for name in ("base", "teacher"):
        if (folder / f"{name}.json").is_file():
            correct = read_json(folder / f"{name}.json")["correct"]
            rows.append([name, "", *(accuracy_cell(correct[str(p)]) for p in PAIRS), ""])
    for steps in STEPS:
        for name in ("no splice", *ARMS):
            seeds = found.get((name, steps))
            if seeds:
                cells = [accuracy_cell("".join(seeds[s][str(p)] for s in sorted(seeds))) for p in PAIRS]
                marks = [_mark(seeds, found.get((_without(name), steps), {}), str(p)) for p in PAIRS]
                marked = [cell + mark for cell, mark in zip(cells, marks, strict=True)]
                rows.append([name, str(steps), *marked, str(len(seeds))])
    return markdown_table(["trained on", "steps", *(f"{pairs} pairs" for pairs in PAIRS), "seeds"], rows)


def _without(name: str) -> str:
    """Name of the arm without a teacher to compare with."""
    return "answers, gold attention" if "gold" in name else "answers"


def _mark(seeds: dict[int, dict[str, str]], others: dict[int, dict[str, str]], pairs: str) -> str:
    shared = sorted(seeds.keys() & others.keys())
    mine, theirs = (np.array([c == "1" for s in shared for c in arm[s][pairs]], bool) for arm in (seeds, others))
    return "*" if min(mcnemar(mine, theirs), mcnemar(theirs, mine)) < 0.025 else ""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--folder", type=Path, default=RUNS / "distil")
    options.add_argument("--base", type=Path, default=SHIPPED)
    options.add_argument("--teacher", type=Path, default=TRANSFORMER)
    options.add_argument("--table", action="store_true", help="print the table of the finished arms")
    args = options.parse_args(arguments)
    quiet_on_one_thread()
    if not args.table:
        run(args.folder, args.base, args.teacher)
    teacher = read_json(args.folder / "teacher.json")
    print(table(args.folder))
    print(f"\nteacher's head {teacher['head']}, {teacher['share']:.2f} of its query's attention on the gold segment")
    print(json.dumps(versions()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
