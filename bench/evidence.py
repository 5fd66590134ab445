"""Does choosing the site by the sharpen test win, and why? `make evidence`, or `python bench/evidence.py`.

Owns: the order of the arms, their files, going on after an interruption. docs/EVIDENCE.md is written from the results.

    python bench/evidence.py               goes on with the first arm that has no result, to the last; then the report
    python bench/evidence.py --only second the arms of one base; processes of different bases may share a folder
    python bench/evidence.py --report      the report alone, from the arms that are there

Every arm is a file, `runs/evidence/arms/BASE-NAME_seedN.json`, written whole when the arm is done. It holds a hash of
what the arm is: an arm of another definition is run again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.utils import logging

from bench.evidence_arms import (
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
from bench.evidence_report import Progress, write_report
from bench.evidence_sites import choose
from bench.evidence_statistics import Results
from bench.evidence_train import run_arm
from surgery.errors import RunError
from surgery.evaluate.prompts import PromptSet, make_prompts
from surgery.files.atomic import fingerprint, new_folder, read_json, write_json
from surgery.models.loading import load_model, load_tokenizer, revision_of
from surgery.recipe import Base, PretrainRecipe, load_recipe
from surgery.run.pretrain import pretrain

SEEDS = (0, 1, 2)
FACTS, TEXTS = "closed_book", "perplexity"  # the halves that no training showed


@dataclass
class Experiment:
    """One folder of results.

    Attributes:
        bases: name -> recipe that makes the checkpoint, None for the one that is shipped.
    """

    folder: Path
    budget: Budget = field(default_factory=Budget)
    seeds: tuple[int, ...] = SEEDS
    shipped: Path = ROOT / "checkpoints" / "pico-mamba2"
    second: Path = ROOT / "bench" / "evidence_base.yaml"
    transformer: Path = ROOT / "checkpoints" / "pico-transformer"
    _loaded: dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase, str]] = field(default_factory=dict)

    def model(self, base: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
        """The pretrained model, its tokenizer, and what identifies its weights; made first where it is not there."""
        if base not in self._loaded:
            own = {SECOND: self.folder / "base", AGAIN: self.folder / "again"}
            where = {SHIPPED: self.shipped, TRANSFORMER: self.transformer, **own}[base]
            if base in own and not where.exists():
                print(f"pretraining the {base} base", flush=True)
                changes = ("seed=1",) if base == AGAIN else ()
                pretrain(load_recipe(self.second, changes, PretrainRecipe), where)
            given = Base(model=str(where))
            self._loaded[base] = (in_short_chunks(load_model(given)), load_tokenizer(given), revision_of(given))
        return self._loaded[base]

    def choices(self, base: str, seed: int) -> Choices:
        """What each method chose, measured once."""
        model, tokenizer, revision = self.model(base)
        path = self.folder / "choices" / f"{base}_seed{seed}.json"
        key = fingerprint([revision, seed, self.budget.locate_pairs, self.budget.locate_examples])
        if not (path.is_file() and read_json(path)["key"] == key):
            write_json(path, {"key": key, "base": base, "seed": seed, **choose(model, tokenizer, self.budget, seed)})
        return read_json(path)

    def arms(self, only: str | None = None) -> Iterator[Arm]:
        """All arms, or those of one base, the most important first; a base is made when its first arm is asked for."""
        bases = [base for base in (SHIPPED, SECOND, AGAIN) if only in (None, base)]
        for family in (main_arms, variant_arms, partial(every_site, each=2)):
            for base, seed in product(bases, self.seeds):
                yield from family(self.choices(base, seed), base, seed)
        if only in (None, TRANSFORMER):
            yield from (Arm(TRANSFORMER, "no-splice", seed) for seed in self.seeds)
        for base, seed in product(bases, self.seeds):
            yield from every_site(self.choices(base, seed), base, seed)

    def result(self, arm: Arm) -> dict[str, Any] | None:
        """What is on disk of this very arm."""
        path = self.folder / "arms" / arm.file
        if not path.is_file():
            return None
        found: dict[str, Any] = read_json(path)
        return found if found["key"] == arm.identity(self.budget, self.model(arm.base)[2]) else None

    def run(self, most: int | None = None, only: str | None = None) -> int:
        """Runs the arms that have no result, `most` of them at most, of the base `only`; returns how many it ran."""
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
    """The same function but for rounding; at these states, without kernels, the scan is a fifth faster."""
    for mixer in [m for m in model.modules() if isinstance(m, Mamba2Mixer)]:
        mixer.chunk_size = 16
    return model


def collected(experiment: Experiment) -> Results:
    """What is on disk of the present budget; choices are read, never measured."""
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
    """Writes the page, its figures, and copies of the arms' results beside them."""
    results, figures = collected(experiment), page.with_name("evidence")
    done = [result for seeds in results.arms.values() for result in seeds.values()]
    if not done:
        raise RunError("evidence", str(experiment.folder), "No arm is finished; run `make evidence` first.")
    facts = _facts(experiment.budget, done)
    write_report(results, Progress(len(done), facts), page, figures)
    for part in ("arms", "choices"):
        with new_folder(figures / part) as folder:
            for path in sorted((experiment.folder / part).glob("*.json")):
                shutil.copyfile(path, folder / path.name)


def _facts(budget: Budget, done: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What there is to know of the finished arms, by name."""
    hours = sum(sum(result["seconds"].values()) for result in done) / 3600
    low, high = budget.pairs
    return {
        "command": "`make evidence` (goes on after an interruption); `bench/evidence.py --report` for this page alone",
        "seeds": ", ".join(map(str, sorted({result["arm"]["seed"] for result in done}))),
        "an arm": f"{budget.steps} steps (AdamW at {budget.lr:g}, new heads {budget.new_heads_lr:g}, cosine), each of "
        f"{budget.rows} dictionaries of {low} to {high} pairs with 4 questions each, {budget.keep_rows} facts and "
        f"{budget.keep_rows} sentences (KL to the frozen base); then {budget.examples} prompts for each number of "
        "pairs, with keys that no training showed",
        "sites": f"chosen on {budget.locate_examples} prompts of {budget.locate_pairs} pairs, others for each seed; "
        "evaluation draws from a seed of its own",
        "time": f"{hours:.1f} hours for these arms on one CPU thread, pretraining not counted",
        "versions": ", ".join(f"{k} {v}" for k, v in done[-1]["versions"].items()),
    }


def questions(budget: Budget) -> PromptSet:
    """What every arm is asked: dictionaries of each size, facts and sentences that no training showed."""
    made = make_prompts(budget.evaluate, PROMPTS_SEED)
    choices = {task: asked for task, asked in made.choices.items() if task.startswith(("kv_retrieval", FACTS))}
    return PromptSet({k: v for k, v in choices.items() if k != f"{FACTS}_seen"}, {TEXTS: made.texts[TEXTS]})


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "evidence")
    parser.add_argument("--report", action="store_true", help="write the report from the arms that are there")
    parser.add_argument("--most", type=int, help="run this many arms and stop")
    parser.add_argument("--only", choices=(SHIPPED, SECOND, AGAIN, TRANSFORMER), help="run the arms of this base alone")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "EVIDENCE.md", help="figures go beside it")
    given = parser.parse_args(words)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    experiment = Experiment(given.folder)
    if not given.report:
        experiment.run(given.most, given.only)
    report(experiment, given.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
