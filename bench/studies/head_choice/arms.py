"""Arms of the study: budget, definitions and order. Imports no torch.

An arm is one training of one set of heads. Choosers with the same set share the arm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.studies.site_selection import arms
from bench.studies.site_selection.arms import Arm
from surgery.recipe import Evaluate, Locate, Optimizer, Source, Train, Weights
from surgery.types import HeadId, Reads, better_read

LAYER = "layer"
COLUMNS = ("1", "2", "4", LAYER, "8")  # numbers of heads, and one whole layer
DESIGN = "design"  # other branches at the head of the default chooser
WIDE = {f"{column}, default branch": column for column in ("1", "2", "4")}  # with the default branch of `splice`
ORDER = ("1", DESIGN, "4", LAYER, "2", "8", *WIDE)  # in which arms run: the most informative first
DESIGNS: Mapping[str, Mapping[str, Any]] = {  # fields of an arm by name; see `splice` in recipes
    "add": {},
    "replace": {"mode": "replace"},
    "add, min_width 64": {"width": 64},
    "replace, min_width 64": {"mode": "replace", "width": 64},
    "add, random": {"init": "random"},
}
PLAIN = "add"  # the design of all other arms
DEFAULT_BRANCH = "add, min_width 64"
DEFAULT_CHOOSER = "patching"
NO_SPLICE = "no-splice"


@dataclass(frozen=True)
class Budget(arms.Budget):
    """Training, evaluation and locating settings: equal for all arms of a base, with equal steps for all bases.

    Attributes:
        task, filler: of the documents to train on and the prompts to answer, and words between key and value.
        questions: for each training document.
        kept: tasks whose first half is trained with KL to the frozen base.
        evaluate_pairs: sizes to evaluate. Arms are compared at the first.
        gates_steps, gates_candidates, trial_steps, trial_candidates: of the published `FORMER` choosers.
    """

    steps: int = 250
    warmup: int = 20
    new_heads_lr: float = 6e-3
    evaluate_pairs: tuple[int, ...] = (32,)
    examples: int = 1000
    task: str = "kv_retrieval"
    filler: tuple[int, int] | None = None
    questions: int = 4
    kept: tuple[str, ...] = ("closed_book", "sentence")
    gates_steps: int = 80
    gates_candidates: int = 12
    trial_steps: int = 32
    trial_candidates: int = 8

    @property
    def answers(self) -> str:
        """Name of the answers that arms are compared by."""
        return f"{self.task}/{self.evaluate_pairs[0]}"

    def train(self, attention: bool, trains: arms.Trains = "all") -> Train:
        """Make the library's training section. `attention` enables its supervision of spliced heads."""
        weights = Weights(answer=1.0, attention=1.0 if attention else 0.0)
        retrieval = Source(
            task=self.task,
            pairs=self.pairs,
            questions=self.questions,
            filler=self.filler,
            rows=self.rows,
            weights=weights,
        )
        kept = (Source(task=task, split=0, rows=self.keep_rows, weights=Weights(base_kl=1.0)) for task in self.kept)
        return Train(
            steps=self.steps,
            trainable=trains,
            sources=(retrieval, *kept),
            optimizer=Optimizer(lr=self.lr, new_heads_lr=self.new_heads_lr, warmup=self.warmup),
        )

    @property
    def evaluate(self) -> Evaluate:
        """The retrieval task, and the halves of facts and sentences that no training showed."""
        task = {"task": self.task, "pairs": self.evaluate_pairs, "filler": self.filler}
        return Evaluate(tasks=(task, "closed_book", "perplexity"), examples=self.examples, sentences=self.sentences)

    def locate(self, method: str) -> Locate:
        """Make the library's section for one locating method."""
        return Locate(methods=(method,), pairs=self.locate_pairs, filler=self.filler, examples=self.locate_examples)


SHORT = Budget(steps=100, warmup=10, new_heads_lr=2e-2, examples=400)  # the steps and rates of paper/EVIDENCE.md

Choices = Mapping[str, Any]  # content of a file in choices/; see `choosers.measure`


def in_order(heads: Sequence[str]) -> tuple[str, ...]:
    """Names of heads by layer and number."""
    return tuple(sorted(heads, key=HeadId.parse))


def heads_chosen(choices: Choices, chooser: str, column: str) -> tuple[str, ...] | None:
    """The heads that a chooser takes, in order; None if it was not measured, or if the model has too few."""
    heads = choices["choosers"].get(chooser, {}).get("heads", {}).get(column)
    return None if heads is None else in_order(heads)


def reads_of(choices: Choices, heads: Sequence[str]) -> tuple[Reads, ...]:
    """The position that the library lets each head read, by its oracle reads."""
    gains = choices["choosers"]["oracle"]["scores"]
    return tuple(better_read(gains[head]) or "answer_token" for head in heads)


def arm_of(choices: Choices, base: str, seed: int, heads: Sequence[str]) -> Arm:
    """The arm of a set of heads. It depends on the set, not on the chooser or the order."""
    ordered = in_order(heads)
    return arm_at(choices, base, seed, "-".join(ordered), ordered)


def arm_at(choices: Choices, base: str, seed: int, name: str, heads: Sequence[str], **more: Any) -> Arm:
    """Arm with a splice at these heads."""
    return Arm(base, name, seed, tuple(heads), reads_of(choices, heads), **{"kind": "softmax", **more})


def design_of(arm: Arm) -> str | None:
    """The name of an arm's branch in `DESIGNS`; None for an arm without a splice."""
    fields = {"mode": arm.mode, "init": arm.init, "width": arm.width}
    plain = {"mode": "add", "init": "ssm", "width": None}
    return next((name for name, given in DESIGNS.items() if arm.heads and fields == {**plain, **given}), None)


def design_arms(choices: Choices, base: str, seed: int) -> Iterator[Arm]:
    """One arm a design, at the head that the default chooser takes first. The plain one is the arm of that chooser."""
    head = choices["choosers"][DEFAULT_CHOOSER]["heads"]["1"][0]
    for name, fields in DESIGNS.items():
        yield arm_at(choices, base, seed, head + suffix_of(name), [head], **fields)


def suffix_of(design: str) -> str:
    """What a design adds to the name of an arm."""
    return "" if design == PLAIN else f"-{design.replace(', ', '-').replace(' ', '-')}"


def arms_of(choices: Choices, base: str, seed: int, column: str) -> Iterator[Arm]:
    """The arms of all choosers in one column, each set once. The first column begins with the control."""
    if column == DESIGN:
        yield from design_arms(choices, base, seed)
        return
    if column in WIDE:
        for arm in (arm for arm in arms_of(choices, base, seed, WIDE[column]) if arm.heads):
            name = arm.name + suffix_of(DEFAULT_BRANCH)
            yield arm_at(choices, base, seed, name, arm.heads, **DESIGNS[DEFAULT_BRANCH])
        return
    if column == COLUMNS[0]:
        yield Arm(base, NO_SPLICE, seed)
    sets = (heads_chosen(choices, chooser, column) for chooser in choices["choosers"])
    for heads in dict.fromkeys(heads for heads in sets if heads is not None):
        yield arm_of(choices, base, seed, heads)
