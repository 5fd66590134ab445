"""Site selection: does the head with the largest oracle-read gain (`sharpen`) make the best splice?

    python -m bench.studies.site_selection                 run the arms that have no result, then write the tables
    python -m bench.studies.site_selection --only second   run the arms of one base; processes may share a folder
    python -m bench.studies.site_selection --report        write the tables and figures of the finished arms

Each arm is one file, `runs/evidence/arms/BASE-NAME_seedN.json`, written when the arm is finished. It holds a hash of
the arm's definition: an arm with another definition runs again. The tables go to the marked places of
paper/EVIDENCE.md, figures and results to paper/evidence/.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

from bench.common import ROOT, RUNS, finished, parser, quiet_on_one_thread
from bench.common import SHIPPED as SHIPPED_MODEL
from bench.common import TRANSFORMER as TRANSFORMER_MODEL
from bench.studies.experiment import ArmExperiment, pretrained
from bench.studies.site_selection.arms import (
    AGAIN,
    PROMPTS_SEED,
    SECOND,
    SHIPPED,
    TRANSFORMER,
    Arm,
    Budget,
    Choices,
    every_site,
    main_arms,
    variant_arms,
)
from bench.studies.site_selection.sites import choose
from bench.studies.site_selection.statistics import Results
from bench.studies.site_selection.tables import draw, fill, tables
from bench.studies.site_selection.train import run_arm
from surgery.errors import RunError
from surgery.evaluate.prompts import PromptSet, make_prompts
from surgery.files.atomic import fingerprint, new_folder, read_json, write_json

RECIPE = Path(__file__).with_name("base.yaml")
FACTS, TEXTS = "closed_book", "perplexity"  # the halves that no training showed


@dataclass
class Experiment(ArmExperiment):
    """A folder of results, and the budget, seeds and base models of its arms."""

    shipped: Path = SHIPPED_MODEL
    second: Path = RECIPE
    transformer: Path = TRANSFORMER_MODEL

    def checkpoint(self, base: str) -> Path:
        """Folder of a base. Pretrain it first if it does not exist."""
        if base == SECOND:
            return pretrained(self.folder / "base", f"the {base} base", self.second)
        if base == AGAIN:
            return pretrained(self.folder / "again", f"the {base} base", self.second, ("seed=1",))
        return {SHIPPED: self.shipped, TRANSFORMER: self.transformer}[base]

    def choices(self, base: str, seed: int) -> Choices:
        """The choice of each method, measured once."""
        model, tokenizer, revision = self.model(base)
        path = self.folder / "choices" / f"{base}_seed{seed}.json"
        key = fingerprint([revision, seed, self.budget.locate_pairs, self.budget.locate_examples])
        if finished(path, key) is None:
            write_json(path, {"key": key, "base": base, "seed": seed, **choose(model, tokenizer, self.budget, seed)})
        return read_json(path)

    def arms(self, only: str | None = None) -> Iterator[Arm]:
        """All arms, or those of one base, the most important first; bases are pretrained when reached."""
        bases = [base for base in (SHIPPED, SECOND, AGAIN) if only in (None, base)]
        for family in (main_arms, variant_arms, partial(every_site, each=2)):
            for base, seed in product(bases, self.seeds):
                yield from family(self.choices(base, seed), base, seed)
        if only in (None, TRANSFORMER):
            yield from (Arm(TRANSFORMER, "no-splice", seed) for seed in self.seeds)
        for base, seed in product(bases, self.seeds):
            yield from every_site(self.choices(base, seed), base, seed)

    @cached_property
    def prompts(self) -> PromptSet:
        """The prompts of every arm."""
        return questions(self.budget)

    def run_arm(self, arm: Arm) -> dict[str, Any]:
        """Train an arm and evaluate it. Returns plain data."""
        base, tokenizer, _ = self.model(arm.base)
        return run_arm(arm, base, tokenizer, self.budget, self.prompts)

    def describe(self, arm: Arm, outcome: dict[str, Any]) -> str:
        """The line to print for a finished arm."""
        shown = {k: round(v["accuracy"], 3) for k, v in outcome["summary"]["kv_retrieval"].items()}
        return f"{arm.base} {arm.name} {list(arm.heads)} seed {arm.seed}: {shown} {outcome['seconds']}"


def collected(experiment: Experiment) -> Results:
    """Results on disk with the present budget. Choices are read, not measured."""
    budget = json.loads(json.dumps(asdict(experiment.budget)))
    arms: dict[tuple[str, str], dict[int, Any]] = {}
    for path in experiment.files("arms"):
        found = read_json(path)
        if found["budget"] == budget:
            arms.setdefault((found["arm"]["base"], found["arm"]["name"]), {})[found["arm"]["seed"]] = found
    choices = {(c["base"], c["seed"]): c for c in map(read_json, experiment.files("choices"))}
    return Results(arms, choices)


def report(experiment: Experiment, page: Path) -> None:
    """Write the tables into the page, and figures and copies of the results into `evidence/` next to the page."""
    results, figures = collected(experiment), page.with_name("evidence")
    done = [result for seeds in results.arms.values() for result in seeds.values()]
    if not done:
        raise RunError("evidence", str(experiment.folder), "No arm is finished. Run `make evidence` first.")
    fill(page, tables(results, settings_of(experiment.budget, done)))
    draw(results, figures)
    for part in ("arms", "choices"):
        with new_folder(figures / part) as folder:
            for path in experiment.files(part):
                shutil.copyfile(path, folder / path.name)


def settings_of(budget: Budget, done: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Budget, time and versions of the finished arms, by name."""
    hours = sum(sum(result["seconds"].values()) for result in done) / 3600
    low, high = budget.pairs
    return {
        "finished arms": str(len(done)),
        "seeds": ", ".join(map(str, sorted({result["arm"]["seed"] for result in done}))),
        "steps": str(budget.steps),
        "AdamW learning rate (cosine)": f"{budget.lr:g}; new heads {budget.new_heads_lr:g}",
        "dictionaries for each step": f"{budget.rows} of {low} to {high} pairs with 4 questions each",
        "facts and sentences for each step (KL to the frozen base)": f"{budget.keep_rows} and {budget.keep_rows}",
        "evaluation prompts for each number of pairs": str(budget.examples),
        "locating prompts for each seed": f"{budget.locate_examples} of {budget.locate_pairs} pairs",
        "time on one CPU thread, without pretraining": f"{hours:.1f} hours",
        "versions": ", ".join(f"{k} {v}" for k, v in done[-1]["versions"].items()),
    }


def questions(budget: Budget) -> PromptSet:
    """The prompts of every arm: dictionaries of each size, and facts and sentences that training does not use."""
    made = make_prompts(budget.evaluate, PROMPTS_SEED)
    choices = {task: asked for task, asked in made.choices.items() if task.startswith(("kv_retrieval", FACTS))}
    return PromptSet({k: v for k, v in choices.items() if k != f"{FACTS}_seen"}, {TEXTS: made.texts[TEXTS]})


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--folder", type=Path, default=RUNS / "evidence")
    options.add_argument("--report", action="store_true", help="write tables and figures of the finished arms only")
    options.add_argument("--most", type=int, help="stop after this many arms")
    options.add_argument("--only", choices=(SHIPPED, SECOND, AGAIN, TRANSFORMER), help="run only the arms of this base")
    options.add_argument("--page", type=Path, default=ROOT / "paper" / "EVIDENCE.md", help="page with the tables")
    args = options.parse_args(arguments)
    quiet_on_one_thread()
    experiment = Experiment(args.folder)
    if not args.report:
        experiment.run(args.most, args.only)
    report(experiment, args.page)
    return 0
