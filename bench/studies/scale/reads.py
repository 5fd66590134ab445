"""Where a trained head reads: its attention at the gold position, by token of the answer.

python -m bench.studies.scale.reads BASE --heads heads.json --folder runs/scale --arm "head L4H5"
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.common import RUNS, load, markdown_table, parser, quiet_on_one_thread
from bench.studies.scale.arms import first_round
from bench.studies.scale.prompts import KINDS, Kind
from bench.studies.scale.study import built
from surgery.data.encoding import encode
from surgery.files.atomic import read_json
from surgery.models.torch_scans import torch_scans
from surgery.probes.documents import Document
from surgery.types import head_set_from_json


@torch.no_grad()
def gold_mass(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, document: Document, reads: str
) -> list[tuple[int, float, float]]:
    """For each read: index of the answer's token, attention of the first head on the gold position, nats of the answer.

    Args:
        reads: gold position of the head, `segment_end` or `answer_token`.
    """
    batch = encode([document], tokenizer)
    output = model(batch.input_ids, use_cache=False, splice_queries=batch.read_query)
    rows_RT: Tensor = output.splice_attentions[0][0, 0]
    queries, gold = batch.read_query[0], getattr(batch, f"read_{reads}")[0]
    logits_RV = output.logits[0, queries].float()
    nats_R = -logits_RV.log_softmax(-1).gather(1, batch.input_ids[0, queries + 1][:, None])[:, 0]
    found, token = [], 0
    for r, (query, place) in enumerate(zip(queries.tolist(), gold.tolist(), strict=True)):
        token = token + 1 if r and query == int(queries[r - 1]) + 1 else 0
        if place >= 0:
            found.append((token, float(rows_RT[r, place]), float(nats_R[r])))
    return found


def table(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, kinds: Sequence[Kind], count: int, reads: str
) -> str:
    """Mean attention at the gold position and nats of the answer, by kind of prompt and token of the answer."""
    rows = []
    for kind in kinds:
        found = [read for d in kind.documents(count, 16, tokenizer) for read in gold_mass(model, tokenizer, d, reads)]
        for token in sorted({read[0] for read in found}):
            masses, nats = zip(*(read[1:] for read in found if read[0] == token), strict=True)
            means = (sum(masses) / len(masses), sum(nats) / len(nats))
            rows.append([kind.name, str(token + 1), str(len(masses)), *(f"{value:.3f}" for value in means)])
    return markdown_table(["prompts", "token of the answer", "reads", "attention at gold", "nats"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("base", type=Path)
    options.add_argument("--heads", type=Path, required=True, help="located heads of the base")
    options.add_argument("--folder", type=Path, default=RUNS / "scale")
    options.add_argument("--arm", required=True, help="name of an arm with a splice that was run")
    options.add_argument("--contexts", type=int, default=8)
    args = options.parse_args(arguments)
    quiet_on_one_thread()
    heads = head_set_from_json(read_json(args.heads))
    (arm,) = (arm for arm in first_round(heads, 1) if arm.name == args.arm)
    base, tokenizer = load(args.base)
    model, plan = built(arm, base, heads)
    weights = args.folder / "models" / arm.file.replace(".json", ".safetensors")
    model.load_state_dict(load_file(weights), strict=False)
    assert plan is not None
    with torch_scans(model):
        print(table(model, tokenizer, KINDS, args.contexts, plan.grafts[0].reads[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
