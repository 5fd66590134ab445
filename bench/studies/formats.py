"""Train and evaluate between formats: heads chosen on dictionaries, spliced into checkpoints/pico-far.

    python -m bench.studies.formats                     run the arms that are not finished, then write the tables
    python -m bench.studies.formats --only records      run one arm
    python -m bench.studies.formats --report            write the tables of the finished arms

Each arm is a run of `recipes/quickstart.yaml` whose retrieval documents have one format, or all of them; it trains the
hybrid and the control. All arms have the same heads, steps, documents in a step, and evaluation prompts. Arms are run
folders in `--folder`: an interrupted one resumes. Results are one file for each arm in `--json`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.common import ROOT, markdown_table, parser, quiet_on_one_thread, save, share_cell
from bench.studies.site_selection.tables import fill
from surgery.files.atomic import read_json
from surgery.recipe import Recipe, check_recipe, load_recipe
from surgery.run.pipeline import run_pipeline

# Label, documents to train on, prompts to evaluate.
FORMATS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dictionary": (
        "dictionary, 32",
        {"task": "kv_retrieval", "pairs": [8, 32], "filler": [0, 12]},
        {"task": "kv_retrieval", "pairs": [32], "filler": [0, 20]},
    ),
    "records": ("records in prose, 16", {"task": "records", "pairs": [4, 16]}, {"task": "records", "pairs": [16]}),
    "phonebook": (
        "phonebook, 16",
        {"task": "phonebook", "pairs": [8, 16], "value_digits": [2, 6]},
        {"task": "phonebook", "pairs": [16], "value_digits": [2, 6]},
    ),
}
ALL = "all"
ARMS = (*FORMATS, ALL)
OF_RETRIEVAL = {"questions": 12, "train_eos": True, "weights": {"answer": 2.0, "attention": 1.0}}
ROWS = 6  # documents of retrieval in a step


def recipe_of(arm: str) -> Recipe:
    """The quickstart, trained on the format of the arm and evaluated on all."""
    data = load_recipe(ROOT / "recipes" / "quickstart.yaml").model_dump(mode="json")
    trained = FORMATS if arm == ALL else [arm]
    retrieval = [{**FORMATS[name][1], **OF_RETRIEVAL, "rows": ROWS // len(trained)} for name in trained]
    kept = [source for source in data["train"]["sources"] if source["task"] != "kv_retrieval"]
    data["train"]["sources"] = [*retrieval, *kept]
    evaluated = [task for _, _, task in FORMATS.values()]
    data["evaluate"] |= {
        "tasks": [*evaluated, "closed_book", "perplexity"],
        "generate": [task["task"] for task in evaluated],
        "efficiency": None,
    }
    data["splice"]["min_width"] = None  # as in the published results
    data["name"] = arm
    return check_recipe(data, Recipe)


def run_arm(arm: str, folder: Path, json: Path) -> None:
    """Run one arm up to its evaluation, and keep its results."""
    recipe = recipe_of(arm)
    siblings = [folder / other for other in ARMS if other != arm and (folder / other).is_dir()]
    run = run_pipeline(recipe, folder / arm, last="evaluate", siblings=siblings)
    results = read_json(run.folder / "results.json")
    save(json / f"{arm}.json", {"heads": results["heads"], "seed": recipe.seed, "arms": results["arms"]})


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Rows: what an arm trained on. Columns: accuracy of generated answers by format, control and hybrid."""
    first = next(iter(results.values()))
    arms = [("", "base", first["arms"]["base"])]
    for trained, result in results.items():
        arms += [(trained, "control", result["arms"]["no_splice"]), (trained, "hybrid", result["arms"]["hybrid"])]
    rows = []
    for trained, label, arm in arms:
        answers = [arm[task["task"]][str(task["pairs"][0])]["generated"] for _, _, task in FORMATS.values()]
        cells = [share_cell(entry["accuracy"], entry["n"]) for entry in answers]
        rows.append([trained, label, *cells, f"{arm['closed_book']['accuracy']:.3f}"])
    header = ["trained on", "", *(label for label, _, _ in FORMATS.values()), "facts"]
    return markdown_table(header, rows) + "\n"


def main() -> int:
    """Parse the command line, run the arms, and write the tables."""
    arguments = parser(__doc__)
    arguments.add_argument("--only", choices=ARMS)
    arguments.add_argument("--report", action="store_true", help="run nothing")
    arguments.add_argument("--folder", type=Path, default=ROOT / "runs" / "formats")
    arguments.add_argument("--json", type=Path, default=ROOT / "paper" / "evidence" / "formats")
    arguments.add_argument("--page", type=Path, help="page with `<!-- begin formats -->` and `<!-- end formats -->`")
    options = arguments.parse_args()
    quiet_on_one_thread()
    for arm in () if options.report else ARMS if options.only is None else (options.only,):
        if not (options.json / f"{arm}.json").is_file():
            run_arm(arm, options.folder, options.json)
    found = {arm: read_json(options.json / f"{arm}.json") for arm in ARMS if (options.json / f"{arm}.json").is_file()}
    if found:
        text = table(found)
        print(text)
        if options.page is not None:
            fill(options.page, {"formats": text})
    return 0


if __name__ == "__main__":
    sys.exit(main())
