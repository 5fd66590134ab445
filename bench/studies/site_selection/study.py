"""Site selection: does the head with the largest oracle-read gain (`sharpen`) make the best splice?

    python -m bench.studies.site_selection                 run the arms that have no result, then write the tables
    python -m bench.studies.site_selection --only second   run the arms of one base; processes may share a folder
    python -m bench.studies.site_selection --report        write the tables and figures of the finished arms

Each arm is one file, `runs/evidence/arms/BASE-NAME_seedN.json`, written when the arm is finished. It holds a hash of
the arm's definition: an arm with another definition runs again. The tables go to the marked places of docs/EVIDENCE.md,
figures and results to docs/evidence/.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from bench.common import ROOT, RUNS, finished, load, parser, quiet_on_one_thread
from bench.common import SHIPPED as SHIPPED_MODEL
from bench.common import TRANSFORMER as TRANSFORMER_MODEL
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
from surgery.models.loading import revision_of
from surgery.recipe import Base, PretrainRecipe, load_recipe
from surgery.run.pretrain import pretrain

RECIPE = Path(__file__).with_name("base.yaml")
SEEDS = (0, 1, 2)
FACTS, TEXTS = "closed_book", "perplexity"  # the halves that no training showed


@dataclass
class Experiment:
    """A folder of results, and the budget, seeds and base models of its arms."""

    folder: Path
    budget: Budget = field(default_factory=Budget)
    seeds: tuple[int, ...] = SEEDS
    shipped: Path = SHIPPED_MODEL
    second: Path = RECIPE
    transformer: Path = TRANSFORMER_MODEL
    _loaded: dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase, str]] = field(default_factory=dict)

    def model(self, base: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
        """The pretrained model, its tokenizer, and its revision. Pretrain it first if it does not exist."""
        if base not in self._loaded:
            pretrained = {SECOND: self.folder / "base", AGAIN: self.folder / "again"}
            where = {SHIPPED: self.shipped, TRANSFORMER: self.transformer, **pretrained}[base]
            if base in pretrained and not where.exists():
                print(f"pretraining the {base} base", flush=True)
                changes = ("seed=1",) if base == AGAIN else ()
                pretrain(load_recipe(self.second, changes, PretrainRecipe), where)
            model, tokenizer = load(where)
            self._loaded[base] = (in_short_chunks(model), tokenizer, revision_of(Base(model=str(where))))
        return self._loaded[base]

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

    def result(self, arm: Arm) -> dict[str, Any] | None:
        """The finished result of an arm, if there is one."""
        return finished(self.folder / "arms" / arm.file, arm.identity(self.budget, self.model(arm.base)[2]))

    def run(self, most: int | None = None, only: str | None = None) -> int:
        """Run the arms that have no result, at most `most`, of the base `only`. Returns the number of arms run."""
        prompts, ran = questions(self.budget), 0
        for arm in self.arms(only):
            if ran == most:
                break
            if self.result(arm) is not None:
                continue
            base, tokenizer, revision = self.model(arm.base)
            outcome = run_arm(arm, base, tokenizer, self.budget, prompts)
            write_json(self.folder / "arms" / arm.file, {"key": arm.identity(self.budget, revision), **outcome})
            ran += 1
            shown = {k: round(v["accuracy"], 3) for k, v in outcome["summary"]["kv_retrieval"].items()}
            print(f"{arm.base} {arm.name} {list(arm.heads)} seed {arm.seed}: {shown} {outcome['seconds']}", flush=True)
        return ran


def in_short_chunks(model: PreTrainedModel) -> PreTrainedModel:
    """Set a shorter chunk. It changes the results by rounding only, and the scan is a fifth faster without kernels."""
    for mixer in [m for m in model.modules() if isinstance(m, Mamba2Mixer)]:
        mixer.chunk_size = 16
    return model


def collected(experiment: Experiment) -> Results:
    """Results on disk with the present budget. Choices are read, not measured."""
    budget = json.loads(json.dumps(asdict(experiment.budget)))
    arms: dict[tuple[str, str], dict[int, Any]] = {}
    for path in sorted((experiment.folder / "arms").glob("*.json")):
        found = read_json(path)
        if found["budget"] == budget:
            arms.setdefault((found["arm"]["base"], found["arm"]["name"]), {})[found["arm"]["seed"]] = found
    choices = {
        (c["base"], c["seed"]): c for c in map(read_json, sorted((experiment.folder / "choices").glob("*.json")))
    }
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
            for path in sorted((experiment.folder / part).glob("*.json")):
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
    options.add_argument("--page", type=Path, default=ROOT / "docs" / "EVIDENCE.md", help="page with the tables")
    args = options.parse_args(arguments)
    quiet_on_one_thread()
    experiment = Experiment(args.folder)
    if not args.report:
        experiment.run(args.most, args.only)
    report(experiment, args.page)
    return 0
