"""Answers with a smaller SSM state, without training: the base, and a hybrid whose base was frozen.

    python -m bench.studies.scale.state BASE --heads heads.json --folder runs/scale --arm 3-heads,-read-first_seed0.json

Channels are chosen by `state_contributions`, as with `splice.state_size`, on prompts of the training split. The new
heads keep their trained weights and the width of their queries and keys.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from bench.common import RUNS, load, markdown_table, parser, quiet_on_one_thread, save
from bench.studies.scale.arms import Arm
from bench.studies.scale.study import Experiment, cell
from surgery.files.atomic import read_json
from surgery.probes.documents import rng_of
from surgery.probes.registry import PROBES, Options
from surgery.splice.graft import cut_model, splice_model
from surgery.splice.plan import make_plan
from surgery.splice.state_size import choose_channels, state_contributions
from surgery.types import head_set_from_json

PROMPTS, PAIRS = 16, 64  # that choose channels
SHOWN = ("32 pairs", "100 pairs", "64 pairs, far", "32 pairs, 4 to 6 digits", "24 records", "24 records, 4 to 6 digits")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("base", type=Path)
    options.add_argument("--heads", type=Path, required=True, help="located heads of the base")
    options.add_argument("--folder", type=Path, default=RUNS / "scale")
    options.add_argument("--arm", required=True, help="file of a result in FOLDER/arms with `trains: new_heads`")
    options.add_argument("--sizes", type=int, nargs="+", default=(32, 16, 8))
    options.add_argument("--contexts", type=int, default=8)
    options.add_argument("--questions", type=int, default=16)
    args = options.parse_args(arguments)
    quiet_on_one_thread()
    heads = head_set_from_json(read_json(args.heads))
    arm = Arm(**read_json(args.folder / "arms" / args.arm)["arm"])
    by_name = {str(head.head): head for head in heads.heads}
    base, tokenizer = load(args.base)
    plan = make_plan(
        replace(heads, chosen=tuple(by_name[name] for name in arm.heads)), base.config, arm.splice, arm.seed
    )
    experiment = Experiment(args.base, heads, args.folder, args.contexts, args.questions)
    weights = load_file(experiment.weights(arm))
    sizes = Options(pairs=PAIRS, questions=1, filler=(0, 20), tokenizer=tokenizer)
    prompts = [PROBES["kv_retrieval"].generate(rng_of("state", i), "train", sizes) for i in range(PROMPTS)]
    contributions = state_contributions(base, tokenizer, prompts, 4)
    rows = []
    for size in args.sizes:
        cut = choose_channels(contributions, size)
        section = arm.splice.model_copy(update={"state_size": size})
        hybrid = splice_model(base, plan, section, cut=cut)
        new = {name: weight for name, weight in weights.items() if ".attention." in name}
        assert len(new) == sum(".attention." in name for name, _ in hybrid.named_parameters())
        hybrid.load_state_dict(new, strict=False)
        for name, model in ((f"base, {size}", cut_model(base, cut)), (f"{arm.name}, {size}", hybrid)):
            with torch.no_grad():
                found = experiment.measure(model, tokenizer)
            save(args.folder / "state" / f"{name.replace(' ', '-')}.json", found)
            cells = [cell(found[kind]["exact"]) for kind in SHOWN]
            rows.append([name, *cells, f"{found['facts']:.2f}", f"{found.get('perplexity', float('nan')):.2f}"])
            print(rows[-1], flush=True)
    print(markdown_table(["model, channels", *SHOWN, "facts", "perplexity"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
