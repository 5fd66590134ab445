"""Where a trained head reads: its attention at the gold position, by token of the answer.

python -m bench.studies.scale.reads BASE --heads heads.json --folder runs/scale --arm head-L4H5_seed0.json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.common import RUNS, load, markdown_table, parser, quiet_on_one_thread
from bench.studies.scale.arms import Arm
from bench.studies.scale.prompts import KINDS, Kind
from bench.studies.scale.study import built, load_weights
from surgery.data.encoding import encode
from surgery.files.atomic import read_json
from surgery.models.torch_scans import torch_scans
from surgery.probes.documents import Document
from surgery.types import Plan, head_set_from_json


@torch.no_grad()
def gold_mass(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, document: Document, plan: Plan
) -> list[tuple[int, tuple[float, ...]]]:
    """For each read: index of the answer's token; then attention of every head on its gold position, and nats."""
    batch = encode([document], tokenizer)
    output = model(batch.input_ids, use_cache=False, splice_queries=batch.read_query)
    queries = batch.read_query[0]
    masses = []
    for graft, attention in zip(plan.grafts, output.splice_attentions, strict=True):
        for h, reads in enumerate(graft.reads):
            gold = getattr(batch, f"read_{reads}")[0]
            masses.append(attention[0, h].gather(1, gold.clamp(min=0)[:, None])[:, 0].tolist())
    logits_RV = output.logits[0, queries].float()
    nats_R = -logits_RV.log_softmax(-1).gather(1, batch.input_ids[0, queries + 1][:, None])[:, 0]
    found, token = [], 0
    for r, query in enumerate(queries.tolist()):
        token = token + 1 if r and query == int(queries[r - 1]) + 1 else 0
        if batch.read_answer_token[0, r] >= 0:
            found.append((token, (*(mass[r] for mass in masses), float(nats_R[r]))))
    return found


def table(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, kinds: Sequence[Kind], count: int, plan: Plan
) -> str:
    """Mean attention at the gold position and nats of the answer, by kind of prompt and token of the answer."""
    rows = []
    for kind in kinds:
        found = [read for d in kind.documents(count, 16, tokenizer) for read in gold_mass(model, tokenizer, d, plan)]
        for token in sorted({read[0] for read in found}):
            values = np.array([read[1] for read in found if read[0] == token])
            rows.append([kind.name, str(token + 1), str(len(values)), *(f"{value:.3f}" for value in values.mean(0))])
    names = [f"gold of {head}" for head in plan.heads]
    return markdown_table(["prompts", "token of the answer", "reads", *names, "nats of the answer"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("base", type=Path)
    options.add_argument("--heads", type=Path, required=True, help="located heads of the base")
    options.add_argument("--folder", type=Path, default=RUNS / "scale")
    options.add_argument("--arm", required=True, help="file of a result in FOLDER/arms, of an arm with a splice")
    options.add_argument("--contexts", type=int, default=8)
    args = options.parse_args(arguments)
    quiet_on_one_thread()
    heads = head_set_from_json(read_json(args.heads))
    arm = Arm(**read_json(args.folder / "arms" / args.arm)["arm"])
    base, tokenizer = load(args.base)
    model, plan = built(arm, base, heads)
    weights = args.folder / "models" / arm.file.replace(".json", ".safetensors")
    load_weights(model, weights)
    assert plan is not None
    with torch_scans(model):
        print(table(model, tokenizer, KINDS, args.contexts, plan))
    return 0


if __name__ == "__main__":
    sys.exit(main())
