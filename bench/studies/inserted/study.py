"""Inserted layers: does a pair find answers where the base cannot, and does the base keep what it knew?

    python -m bench.studies.inserted                   train the arms that have no result, then write the report
    python -m bench.studies.inserted --only shipped    train the arms of one base; processes may share a folder
    python -m bench.studies.inserted --designs pair    train the arms of one design, or of several
    python -m bench.studies.inserted --report          write the tables of the finished arms

Each arm is one training and one file, `FOLDER/BASE-DESIGN_seedN.json`, written when it is finished. A file holds a hash
of its definition: another definition is trained again. Results in paper/evidence/inserted are used as they are.
"""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.common import (
    FAR_AGAIN,
    ROOT,
    RUNS,
    accuracy_cell,
    as_digits,
    finished,
    load,
    markdown_table,
    parser,
    quiet_on_one_thread,
    save,
)
from bench.studies.experiment import in_short_chunks
from bench.studies.head_choice import bases as of_head_choice
from bench.studies.head_choice.arms import Budget
from bench.studies.head_choice.bases import DISTANT, StudyBase
from bench.studies.inserted import nemotron_h
from bench.studies.site_selection.tables import fill
from surgery.evaluate.evaluation import evaluate_model
from surgery.evaluate.prompts import make_prompts
from surgery.files.atomic import fingerprint, read_json
from surgery.models.loading import revision_of
from surgery.models.lookup import geometry_of
from surgery.recipe import Base, Evaluate, Optimizer, Source, Splice, Train, Weights
from surgery.splice.graft import splice_model
from surgery.splice.plan import make_plan
from surgery.train.targets import Targets
from surgery.train.trainer import StageTrainer
from surgery.train.training import make_accelerator
from surgery.types import HeadId, HeadSet, ScoredHead

PAGE = ROOT / "paper" / "INSERTED.md"
PUBLISHED = ROOT / "paper" / "evidence" / "inserted"
VERSION = 1  # raised when an arm's result changes for the same definition
PROMPTS_SEED = 0
STEPS = 250


@dataclass(frozen=True)
class Place:
    """Where layers are inserted into a base, and how fast the base trains.

    Attributes:
        head: the head that `aggregate` takes first.
        before: layer of the base that follows.
        lr: learning rate of the base's weights.
    """

    head: str
    before: int
    lr: float = 1e-3


BASES: Mapping[str, StudyBase] = {
    **of_head_choice.BASES,
    "far-again": StudyBase("the recipe of `pico-far` with seed 1", FAR_AGAIN, options=DISTANT),
    "nemotron_h": StudyBase("a Nemotron-H with MLPs, adjacent pairs", nemotron_h.FOLDER, nemotron_h.make),
}
PLACES: Mapping[str, Place] = {
    "shipped": Place("L0H1", 0),
    "english": Place("L0H0", 0),
    "far": Place("L3H2", 3, 2e-3),
    "far-again": Place("L3H0", 3, 2e-3),
    "nemotron_h": Place("L1H1", 1),
}


@dataclass(frozen=True)
class Design:
    """What is inserted, and what trains.

    Attributes:
        splice: fields of the recipe's section `splice`; None for the control.
        trainable: what trains.
        attention: weight of the attention loss in the first and the last step.
        steps: number of steps.
        facts: weight of the KL to the base on facts.
        lr: learning rate of the base's weights; None for that of the place.
        more_heads: heads in other layers than the place's, each with a pair of its own.
        bases: names in `PLACES`; empty for all.
    """

    splice: Mapping[str, Any] | None
    trainable: str = "all"
    attention: tuple[float, float] = (8.0, 1.0)
    steps: int = STEPS
    facts: float = 1.0
    lr: float | None = None
    more_heads: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()


DESIGNS: Mapping[str, Design] = {
    "pair": Design({"form": "pair"}),
    "pair-facts": Design({"form": "pair"}, facts=2.0, bases=("nemotron_h",)),
    "pair-copies": Design({"form": "pair", "init": "ssm"}),
    "pair-copies-long": Design({"form": "pair", "init": "ssm"}, steps=500, bases=("far",)),
    "pair-copies-longer": Design({"form": "pair", "init": "ssm"}, steps=750, facts=2.0, bases=("far", "far-again")),
    "pair-copies-facts": Design({"form": "pair", "init": "ssm"}, steps=750, facts=4.0, bases=("far-again",)),
    "pair-copies-slow": Design({"form": "pair", "init": "ssm"}, steps=1000, facts=4.0, lr=1e-3, bases=("far-again",)),
    "pair-copies-mid": Design({"form": "pair", "init": "ssm"}, steps=1250, facts=4.0, lr=1.5e-3, bases=("far-again",)),
    "pair-long": Design({"form": "pair"}, steps=500, bases=("far",)),
    "pair-twice-long": Design({"form": "pair"}, steps=500, more_heads=("L2H1",), bases=("far",)),
    "head-long": Design({"form": "head"}, steps=500, bases=("far",)),
    "pair-alone": Design({"form": "pair"}, "new_heads", (4.0, 4.0)),
    "pair-shared": Design({"form": "pair", "side_channels": 0}),
    "block": Design({"form": "block"}),
    "control": Design(None),
}
ORDER = (
    *(("pair", 0), ("control", 0), ("pair-copies", 0), ("pair-shared", 0), ("block", 0), ("pair-alone", 0)),
    *((design, seed) for seed in (0, 1, 2) for design in ("pair-copies-long", "head-long")),
    *(("pair-copies-longer", seed) for seed in (1, 2, 0)),
    *(("pair-copies-facts", seed) for seed in (1, 2, 0)),
    *(("pair-copies-slow", seed) for seed in (1, 2, 0)),
    *(("pair-copies-mid", seed) for seed in (1, 0, 2)),
    *(("pair-long", 0), ("pair-twice-long", 0)),
    *(("pair-facts", seed) for seed in (0, 1, 2)),
    *((design, seed) for seed in (1, 2) for design in ("pair", "pair-copies", "pair-alone")),
)


@dataclass(frozen=True)
class Arm:
    """One training: a base, a design of `DESIGNS`, and the seed of the new layers and the documents."""

    base: str
    design: str
    seed: int

    @property
    def file(self) -> str:
        return f"{self.base}-{self.design}_seed{self.seed}.json"

    @property
    def budget(self) -> Budget:
        """Of the study of head choice, for the documents and prompts of this base."""
        return Budget(**BASES[self.base].options)

    @property
    def splice(self) -> Splice | None:
        fields, place = DESIGNS[self.design].splice, PLACES[self.base]
        if fields is None:
            return None
        before = {} if fields["form"] == "head" else {"before": place.before}
        heads = (place.head, *DESIGNS[self.design].more_heads)
        return Splice.model_validate({"select": "list", "heads": heads, **before, **fields})

    @property
    def train(self) -> Train:
        """The quickstart's mixture: documents with the base's filler, adjacent pairs, and all that is kept."""
        design, budget = DESIGNS[self.design], self.budget
        attention = 0.0 if design.splice is None else design.attention
        pairs = {"task": budget.task, "pairs": (8, 32), "questions": 12, "train_eos": True}
        pairs["weights"] = Weights(answer=2.0, attention=attention)
        filler = None if budget.filler is None else (0, 12)
        sources = [Source(rows=6, filler=filler, **pairs), Source(rows=2, **pairs)]
        for task, rows in (("closed_book", 12), ("statement", 6), ("sentence", 12)):
            weight = design.facts if task == "closed_book" else 1.0
            sources.append(Source(task=task, split=0, rows=rows, weights=Weights(base_kl=weight)))
        return Train(
            steps=design.steps,
            trainable=design.trainable,
            sources=tuple(sources),
            optimizer=Optimizer(lr=design.lr or PLACES[self.base].lr, new_heads_lr=2e-3, warmup=20),
        )

    @property
    def evaluate(self) -> Evaluate:
        task = {"task": self.budget.task, "pairs": (32, 64), "filler": self.budget.filler}
        return Evaluate(tasks=(task, "closed_book", "perplexity"), examples=400, sentences=200, batch_size=8)

    @property
    def key(self) -> str:
        """Hash of everything that the result depends on."""
        base = BASES[self.base]
        definition = [asdict(replace(DESIGNS[self.design], bases=())), asdict(PLACES[self.base]), base.options]
        return fingerprint([VERSION, asdict(self), definition, PROMPTS_SEED, revision_of(Base(model=str(base.folder)))])


def arms(only: str | None = None, designs: Sequence[str] = tuple(DESIGNS)) -> Iterator[Arm]:
    """All arms, or those of one base and some designs, the most informative first. Bases without a folder have none."""
    for design, seed in ORDER:
        if design not in designs:
            continue
        bases = [base for base in DESIGNS[design].bases or PLACES if only in (None, base)]
        yield from (Arm(base, design, seed) for base in bases if BASES[base].folder.is_dir())


def run_arm(arm: Arm, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Train and evaluate. Returns right and wrong by prompt, perplexity, the last losses, and seconds."""
    began = time.process_time()
    model, grafts = copy.deepcopy(base), ()
    if arm.splice is not None:
        scored = tuple(ScoredHead(HeadId.parse(head), "neither", "answer_token", {}) for head in arm.splice.heads)
        heads = HeadSet(arm.base, "", geometry_of(base.config), scored, scored, "list", arm.seed)
        plan = make_plan(heads, base.config, arm.splice, arm.seed)
        model, grafts = splice_model(base, plan, arm.splice), plan.grafts
    targets = Targets(base=base, grafts=grafts)
    history = StageTrainer(model, tokenizer, arm.train, arm.seed, make_accelerator(), targets).run()
    trained = time.process_time()
    result = evaluate_model(
        model, tokenizer, arm.evaluate, 0, make_prompts(arm.evaluate, PROMPTS_SEED, tokenizer=tokenizer)
    )
    last = history[-len(history) // 10 :]
    losses = {
        name: sum(entry[name] for entry in last) / len(last) for name in last[-1] if name in ("answer", "base_kl")
    }
    return {
        "arm": asdict(arm),
        "correct": {task: as_digits(right) for task, right in result.correct.items()},
        "perplexity": result.summary["perplexity"],
        "losses": losses,
        "cpu_seconds": {"train": round(trained - began, 1), "evaluate": round(time.process_time() - trained, 1)},
    }


def result_of(arm: Arm, folder: Path) -> dict[str, Any] | None:
    """The finished result of an arm, in this folder or published."""
    key = arm.key
    results = (finished(place / arm.file, key) for place in (folder, PUBLISHED))
    return next((result for result in results if result is not None), None)


def run(folder: Path, only: str | None = None, designs: Sequence[str] = tuple(DESIGNS)) -> None:
    """Train the arms that have no result."""
    for arm in arms(only, designs):
        if result_of(arm, folder) is not None:
            continue
        base, tokenizer = load(BASES[arm.base].folder)
        result = run_arm(arm, in_short_chunks(base), tokenizer)
        save(folder / arm.file, {"key": arm.key, **result})
        shown = {task: round(right.count("1") / len(right), 3) for task, right in result["correct"].items()}
        print(arm.file, shown, result["cpu_seconds"], flush=True)


def tables(folders: Sequence[Path]) -> dict[str, str]:
    """One table: a row for each result, by base. The first folder with a file has precedence."""
    files = {path.name: path for folder in reversed(folders) for path in folder.glob("*_seed*.json")}
    results = [read_json(path) for path in files.values()]
    bases, designs = list(PLACES), list(DESIGNS)
    results.sort(key=lambda r: (bases.index(r["arm"]["base"]), designs.index(r["arm"]["design"]), r["arm"]["seed"]))
    rows = []
    for result in results:
        arm, kl = result["arm"], result["losses"].get("base_kl", 0.0)
        cells = [accuracy_cell(right) for right in result["correct"].values()]
        perplexity = f"{result['perplexity']:.3f}"
        rows.append([arm["base"], f"`{arm['design']}`", str(arm["seed"]), *cells, perplexity, f"{kl:.3f}"])
    header = ["base", "design", "seed", "32 pairs", "64 pairs", "facts, held-out half", "perplexity", "KL to the base"]
    return {"arms": markdown_table(header, rows) + "\n"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, train the arms, and write the report."""
    options = parser(__doc__)
    options.add_argument("--folder", type=Path, default=RUNS / "inserted")
    options.add_argument("--report", action="store_true", help="write the tables of the finished arms only")
    options.add_argument("--only", choices=tuple(PLACES), metavar="BASE", help=f"one of {', '.join(PLACES)}")
    options.add_argument("--designs", nargs="+", choices=tuple(DESIGNS), default=tuple(DESIGNS), metavar="DESIGN")
    args = options.parse_args(arguments)
    quiet_on_one_thread()
    if not args.report:
        run(args.folder, args.only, args.designs)
    for arm in arms():
        if finished(args.folder / arm.file, arm.key) is not None:
            PUBLISHED.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(args.folder / arm.file, PUBLISHED / arm.file)
    fill(PAGE, tables([PUBLISHED]))
    return 0
