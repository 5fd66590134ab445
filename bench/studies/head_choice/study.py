"""Choice of heads: which way to choose never loses much? Every chooser is scored by regret.

    python -m bench.studies.head_choice                  run the arms that have no result, then write the report
    python -m bench.studies.head_choice --only far       run the arms of one base; processes may share a folder
    python -m bench.studies.head_choice --at-most 5      stop after five arms; 0 measures the first choices only
    python -m bench.studies.head_choice --report         write the report of the finished arms
    python -m bench.studies.head_choice --short          fewer steps and prompts, in a folder of their own

Regret is the best accuracy that any tried set of the same number of heads reaches after full training, minus that of
the chooser's set. Each arm is one file, `FOLDER/arms/BASE-HEADS_seedN.json`, written when it is finished. The choices
are in `FOLDER/choices/BASE_seedN.json`, which grows with every chooser. Files hold a hash of their definition: another
definition is measured again. Results in paper/evidence/head_choice are used as they are.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import ROOT, RUNS, parser, quiet_on_one_thread, share
from bench.studies.experiment import ArmExperiment
from bench.studies.head_choice.arms import (
    COLUMNS,
    ORDER,
    PLAIN,
    SHORT,
    Arm,
    Budget,
    Choices,
    arms_of,
    design_of,
    reads_of,
)
from bench.studies.head_choice.bases import BASES, StudyBase
from bench.studies.head_choice.choosers import measure
from bench.studies.head_choice.figures import regret_by_chooser
from bench.studies.head_choice.regret import Results, regrets
from bench.studies.head_choice.tables import tables
from bench.studies.site_selection.arms import PROMPTS_SEED
from bench.studies.site_selection.tables import fill
from bench.studies.site_selection.train import run_arm
from surgery.errors import RunError
from surgery.evaluate.prompts import make_prompts
from surgery.files.atomic import fingerprint, read_json, write_json
from surgery.models.loading import revision_of
from surgery.recipe import Base

PAGE = ROOT / "paper" / "HEAD_CHOICE.md"
PUBLISHED = PAGE.parent / "evidence" / "head_choice"
VERSION = 1  # raised when choices change for the same definition


@dataclass
class Experiment(ArmExperiment):
    """A folder of results, and the budget, seeds and bases of its arms.

    Attributes:
        published: folder of earlier results with the same layout; None for none. It is only read.
    """

    budget: Budget = field(default_factory=Budget)
    bases: Mapping[str, StudyBase] = field(default_factory=lambda: BASES)
    published: Path | None = None

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders with results: this one and the published one."""
        return (self.folder,) if self.published is None else (self.folder, self.published)

    def budget_of(self, base: str) -> Budget:
        """The budget with the options of a base."""
        return replace(self.budget, **self.bases[base].options)

    def checkpoint(self, base: str) -> Path:
        """Folder of a base. Make it first if it does not exist."""
        entry = self.bases[base]
        if entry.make is not None and not entry.folder.is_dir():
            print(f"making {entry.label}", flush=True)
            entry.make(entry.folder)
        if not entry.folder.is_dir():
            raise RunError("base", base, f"There is no folder {entry.folder}. Make this checkpoint first.")
        return entry.folder

    def revision(self, base: str) -> str:
        """Identify the weights of an existing checkpoint."""
        return revision_of(Base(model=str(self.bases[base].folder)))

    def choices(self, base: str, seed: int) -> Choices:
        """The choices of all choosers. Those that are not on disk are measured, and written one after the other."""
        model, tokenizer, revision = self.model(base)
        name, key = f"{base}_seed{seed}.json", self.choices_key(base, seed, revision)
        earlier = self.find("choices", name, key) or {"key": key, "base": base, "seed": seed}
        choices = earlier
        for choices in measure(model, tokenizer, self.budget_of(base), seed, earlier):
            write_json(self.folder / "choices" / name, choices)
            latest, choice = list(choices["choosers"].items())[-1]
            print(f"{base} seed {seed} {latest}: {choice['heads']} {choice['cpu_seconds']} CPU seconds", flush=True)
        return choices

    def choices_key(self, base: str, seed: int, revision: str) -> str:
        """Hash of everything that choices depend on. Training and evaluation are no part of it."""
        budget = asdict(self.budget_of(base))
        names = ("filler", *(name for name in budget if name.startswith(("locate_", "gates_", "trial_"))))
        return fingerprint([VERSION, revision, seed, {name: budget[name] for name in names}])

    def available(self, only: str | None = None) -> list[str]:
        """Bases that exist or can be made. Prints a line for each other one."""
        names = [base for base in self.bases if only in (None, base)]
        for base in names:
            if not self.bases[base].available:
                print(f"skipping {base}: there is no folder {self.bases[base].folder}", flush=True)
        return [base for base in names if self.bases[base].available]

    def arms(self, only: str | None = None) -> Iterator[Arm]:
        """All arms, or those of one base, the most informative first. Choices are measured when reached."""
        bases = self.available(only)
        for seed in self.seeds:
            for column in ORDER:
                for base in bases:
                    yield from arms_of(self.choices(base, seed), base, seed, column)

    def run_arm(self, arm: Arm) -> dict[str, Any]:
        """Train an arm and evaluate it. Returns plain data."""
        (base, tokenizer, _), budget = self.model(arm.base), self.budget_of(arm.base)
        prompts = make_prompts(budget.evaluate, PROMPTS_SEED, tokenizer=tokenizer)
        began = time.process_time()
        outcome = run_arm(arm, base, tokenizer, budget, prompts)
        return {**outcome, "cpu_seconds": round(time.process_time() - began, 1)}

    def describe(self, arm: Arm, outcome: dict[str, Any]) -> str:
        """The line to print for a finished arm."""
        answers = self.budget_of(arm.base).answers
        shown = f"{share(outcome['correct'][answers]):.3f} at {answers}, {outcome['cpu_seconds']} CPU seconds"
        return f"{arm.base} {arm.name} seed {arm.seed}: {shown}"


def collected(experiment: Experiment) -> tuple[Results, dict[str, list[Path]]]:
    """Read the results of this folder and the published ones. Nothing is measured.

    A result must have the present budget and, where the checkpoint exists, its revision.

    Returns:
        The results, and the files that hold them by `arms` and `choices`.
    """
    choices: dict[tuple[str, int], Choices] = {}
    answers: dict[tuple[str, int], dict[tuple[str, ...], Any]] = {}
    designs: dict[tuple[str, int], dict[str, dict[tuple[str, ...], Any]]] = {}
    files: dict[str, list[Path]] = {"arms": [], "choices": []}
    for path in experiment.files("choices"):
        content = read_json(path)
        base, seed = content["base"], content["seed"]
        if base not in experiment.bases or (base, seed) in choices:
            continue
        there = experiment.bases[base].folder.is_dir()
        if there and content["key"] != experiment.choices_key(base, seed, experiment.revision(base)):
            continue
        choices[base, seed] = content
        files["choices"].append(path)
    for path in experiment.files("arms"):
        content = read_json(path)
        arm = Arm(**{k: tuple(v) if isinstance(v, list) else v for k, v in content["arm"].items()})
        place, design = (arm.base, arm.seed), design_of(arm)
        by_heads = answers.setdefault(place, {})
        if design not in (None, PLAIN):
            by_heads = designs.setdefault(place, {}).setdefault(design, {})
        if arm.base not in experiment.bases or arm.heads in by_heads:
            continue
        if arm.heads and (place not in choices or arm.reads != reads_of(choices[place], arm.heads)):
            continue
        budget = experiment.budget_of(arm.base)
        there = experiment.bases[arm.base].folder.is_dir()
        if there and content["key"] != arm.identity(budget, experiment.revision(arm.base)):
            continue
        if content["budget"] != json.loads(json.dumps(asdict(budget))):
            continue
        by_heads[arm.heads] = np.array([float(x) for x in content["correct"][budget.answers]])
        files["arms"].append(path)
    return Results(choices, answers, designs), files


def report(experiment: Experiment, page: Path, folder: Path) -> None:
    """Write the tables into the page, and the figure and copies of the results into a folder.

    Raises:
        RunError: no heads were chosen yet.
    """
    results, files = collected(experiment)
    if not results.choices:
        raise RunError("head_choice", str(experiment.folder), "Nothing is measured. Run the study without --report.")
    labels = {base: experiment.bases[base].label for base in experiment.bases}
    done = [read_json(path) for path in files["arms"]]
    fill(page, tables(results, labels, settings_of(experiment, done)))
    found = {(base, column): regrets(results, base, column) for base in labels for column in COLUMNS}
    regret_by_chooser({place: values for place, values in found.items() if values}, labels, folder)
    for part, paths in files.items():
        for path in paths:
            target = folder / part / path.name
            if target != path:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)


def settings_of(experiment: Experiment, done: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Budget, time and versions of the finished arms, by name."""
    budget = experiment.budget
    counts = {base: experiment.budget_of(base).examples for base in experiment.bases}
    fewer = {base: count for base, count in counts.items() if count != budget.examples}
    versions = {", ".join(f"{k} {v}" for k, v in result["versions"].items()) for result in done}
    minutes = sum(result["cpu_seconds"] for result in done) / 60
    return {
        "finished arms": str(len(done)),
        "seeds of finished arms": ", ".join(map(str, sorted({result["arm"]["seed"] for result in done}))) or "none",
        "steps": str(budget.steps),
        "AdamW learning rate (cosine)": f"{budget.lr:g}; new heads {budget.new_heads_lr:g}",
        "documents in a step": f"{budget.rows} of retrieval with {budget.questions} questions, "
        f"{budget.keep_rows} of each kept task (KL to the base)",
        "evaluation prompts": ", ".join([str(budget.examples), *(f"{n} for `{base}`" for base, n in fewer.items())]),
        "locating prompts for each seed": str(budget.locate_examples),
        "`gates`": f"{budget.gates_steps} steps, {budget.gates_candidates} candidates",
        "`trial`": f"{budget.trial_steps} steps in the first round, {budget.trial_candidates} candidates",
        "CPU time of the arms, one thread": f"{minutes:.0f} minutes",
        "versions": "; ".join(sorted(versions)) or "none",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run the arms, and write the report."""
    options = parser(__doc__)
    options.add_argument("--folder", type=Path, help="default: runs/head_choice, or runs/head_choice-short")
    options.add_argument("--report", action="store_true", help="write the report of the finished arms only")
    options.add_argument("--at-most", type=int, metavar="N", help="stop after this many arms")
    options.add_argument("--only", choices=tuple(BASES), metavar="BASE", help=f"one of {', '.join(BASES)}")
    options.add_argument("--short", action="store_true", help="fewer steps and prompts; does not change paper/")
    args = options.parse_args(arguments)
    quiet_on_one_thread()
    folder = args.folder or RUNS / ("head_choice-short" if args.short else "head_choice")
    if args.short:
        experiment, page, evidence = Experiment(folder, SHORT), folder / "HEAD_CHOICE.md", folder
    else:
        experiment, page, evidence = Experiment(folder, published=PUBLISHED), PAGE, PUBLISHED
    if not args.report:
        experiment.run(args.at_most, args.only)
    if args.report or collected(experiment)[0].choices:
        report(experiment, page, evidence)
    return 0
