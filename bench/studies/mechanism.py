"""Test whether a base retrieves by Gather and Aggregate heads (arXiv 2504.18574). Trains nothing.

    python -m bench.studies.mechanism --base checkpoints/pico-far --page paper/BASES.md

Three measurements, on words that no training showed:

1. Accuracy by format and size, ranked and generated.
2. Accuracy at key-value retrieval with sets of heads removed, and with few heads kept. `surgery locate` calls the heads
   Gather or Aggregate.
3. Accuracy of the first layers alone.

The tables go to the marked place of the page, the numbers to `--json`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.common import FAR as PICO_FAR
from bench.common import ROOT, load, markdown_table, parser, quiet_on_one_thread, save, share_cell
from bench.plugins.redundancy import ablate_sets
from bench.studies.site_selection.tables import fill
from surgery.evaluate.evaluation import evaluate_model
from surgery.locate.ablation import Ablation
from surgery.locate.batches import PromptBatches
from surgery.locate.locating import locate_heads
from surgery.models.alterations import altered
from surgery.models.lookup import family_of
from surgery.recipe import Evaluate, Locate, Splice
from surgery.types import HeadId, HeadSet

FAR = [1, 20]  # words between a key and its value
FORMATS: dict[str, dict[str, Any]] = {
    "dictionary": {"task": "kv_retrieval", "pairs": [8, 16, 32]},
    "dictionary, 1 to 20 words between": {"task": "kv_retrieval", "pairs": [8, 16, 32], "filler": FAR},
    "dictionary, numbers of 4 to 8 digits": {"task": "kv_retrieval", "pairs": [8], "value_digits": [4, 8]},
    "records in prose": {"task": "records", "pairs": [4, 8]},
    "phonebook, numbers of 2 to 6 digits": {"task": "phonebook", "pairs": [8], "value_digits": [2, 6]},
    "JSON, keys as long as a UUID": {"task": "json_kv", "pairs": [8], "value_digits": [2, 4]},
    "two-hop": {"task": "multi_hop", "pairs": [8]},
    "facts": {"task": "closed_book"},
}


def formats(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: int, seed: int) -> list[list[Any]]:
    """Accuracy by format: rows of name, size, shares of right answers ranked and generated, and number of prompts."""
    rows = []
    for label, task in FORMATS.items():
        section = Evaluate.model_validate({"tasks": [task], "examples": examples, "generate": True})
        found = evaluate_model(model, tokenizer, section, seed).summary[task["task"]]
        for size in task.get("pairs", [None]):
            entry = found if size is None else found[str(size)]
            rows.append([label, size, entry["accuracy"], entry["generated"]["accuracy"], entry["n"]])
    return rows


def head_sets(found: HeadSet) -> dict[str, Sequence[HeadId]]:
    """Sets of heads to remove, by name."""
    heads = [scored.head for scored in found.heads]
    gather, aggregate = (
        [scored.head for scored in found.heads if scored.role == role] for role in ("gather", "aggregate")
    )
    called = {*gather, *aggregate}
    layers = {head.layer for head in called}
    sets: dict[str, Sequence[HeadId]] = {f"{head} (Aggregate) removed": [head] for head in aggregate}
    sets |= {f"{head} (Gather) removed": [head] for head in gather}
    if gather:
        sets["all Gather heads removed"] = gather
    if aggregate:
        sets["all Aggregate heads removed"] = aggregate
    if called:
        sets["only the named heads kept in their layers"] = [h for h in heads if h.layer in layers and h not in called]
        sets["only the named heads kept, all others removed"] = [head for head in heads if head not in called]
    return sets


def removals(found: HeadSet, prompts: PromptBatches) -> list[list[Any]]:
    """Accuracy without each set of heads: rows of name and share of right answers."""
    sets = head_sets(found)
    clean, changed = ablate_sets(prompts, Ablation(), list(sets.values()))
    shares = [float(scores[1].mean()) for scores in (clean, *changed)]
    return [list(row) for row in zip(("nothing removed", *sets), shares, strict=True)]


def first_layers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: int, seed: int
) -> list[list[Any]]:
    """Accuracy at 8 pairs of the first layers alone: rows of the number of layers and the share of right answers."""
    task = {"task": "kv_retrieval", "pairs": [8], "filler": FAR}
    section = Evaluate.model_validate({"tasks": [task], "examples": examples})
    specs, rows = family_of(model.config).mixers(model.config), []
    for layers in range(model.config.num_hidden_layers, 0, -1):
        with altered(model, specs, {}, layers=layers):
            summary = evaluate_model(model, tokenizer, section, seed).summary
        rows.append([layers, summary["kv_retrieval"]["8"]["accuracy"]])
    return rows


def tables(results: Mapping[str, Any]) -> str:
    """Render the tables as Markdown."""

    examples = results["examples"]
    formats = [
        [name, str(size or ""), share_cell(ranked, n), share_cell(generated, n)]
        for name, size, ranked, generated, n in results["formats"]
    ]
    parts = [
        markdown_table(["format", "records", "right among the choices", "answer generated"], formats),
        *(
            markdown_table([title, "accuracy"], [[str(name), share_cell(share, examples)] for name, share in rows])
            for title, rows in (
                ("dictionary of 8, 1 to 20 words between", results["removals"]),
                ("layers that run", results["layers"]),
            )
        ),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Parse the command line, measure, and write tables and numbers."""
    arguments = parser(__doc__)
    arguments.add_argument("--base", type=Path, default=PICO_FAR)
    arguments.add_argument("--examples", type=int, default=400, help="prompts that measure an accuracy")
    arguments.add_argument("--located", type=int, default=2400, help="prompts that decide which heads are called")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument(
        "--page",
        type=Path,
        help="page with `<!-- begin NAME -->` and `<!-- end NAME -->`, NAME being the folder of the base",
    )
    arguments.add_argument("--json", type=Path, default=ROOT / "paper" / "bases" / "mechanism.json")
    options = arguments.parse_args()
    quiet_on_one_thread()
    model, tokenizer = load(options.base)
    prompts = {"pairs": 8, "filler": FAR, "methods": ["query", "context"]}
    section = Locate.model_validate(prompts | {"examples": options.located})
    found = locate_heads(model, tokenizer, section, Splice(select="aggregate"), options.seed)
    section = Locate.model_validate(prompts | {"examples": options.examples})
    others = PromptBatches(model, tokenizer, section, options.seed + 1)
    results = {
        "base": options.base.name,
        "examples": options.examples,
        "located": options.located,
        "seed": options.seed,
        "roles": {str(s.head): s.role for s in found.heads if s.role != "neither"},
        "removals": removals(found, others),
        "layers": first_layers(model, tokenizer, options.examples, options.seed),
        "formats": formats(model, tokenizer, options.examples, options.seed),
    }
    save(options.json, results)
    text = tables(results)
    print(text)
    if options.page is not None:
        fill(options.page, {options.base.name: text})
    return 0


if __name__ == "__main__":
    sys.exit(main())
