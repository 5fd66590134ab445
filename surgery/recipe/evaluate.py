"""Schema of the section `evaluate`: tasks and their sizes. See docs/EVALUATE.md."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_serializer, model_validator

from surgery.probes.registry import PROBES, Probe
from surgery.recipe.section import (
    Filler,
    Groups,
    OneOrMore,
    PairsSizes,
    Positive,
    Section,
    ValueDigits,
    check_value_digits,
    one_message,
)
from surgery.registry import NameOf


class Efficiency(Section):
    """Time and memory of every arm, compared with the base and a Transformer of the same width."""

    lengths: tuple[Positive, ...] = Field((128, 1024), min_length=1)
    """Prompt lengths in tokens."""
    batch_sizes: tuple[Positive, ...] = Field((1,), min_length=1)
    """Prompts per batch."""
    new_tokens: Positive = 16
    """Tokens to generate after each prompt."""
    repeats: Positive = 5
    """Timings per model and size, interleaved. The median is reported."""
    transformer: bool = True
    """Also time a randomly initialised Transformer of the same width, depth and number of parameters."""


_KEYS_OF_ARMS = ("held_out", "lm_eval", "notes")  # other entries of an arm in results.json


class EvaluationTask(Section):
    """One task of an evaluation, at one or several sizes. docs/EVALUATE.md shows each task."""

    task: Annotated[str, NameOf(PROBES, keep=lambda probe: probe.evaluates), Field(examples=["kv_retrieval"])]
    pairs: PairsSizes | None = None
    """Key-value pairs per prompt, or pieces for copying: a list of sizes, or one number. By default
    `evaluate.pairs`."""
    tokens: tuple[Positive, ...] = Field((512,), min_length=1)
    """needle_*, variable_tracking, common_words: maximum prompt lengths in tokens."""
    depths: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field((0.0, 0.25, 0.5, 0.75, 1.0), min_length=1)
    """needle_*: depths of the needle, as shares of the text before it."""
    needles: Annotated[int, Field(ge=2, le=16, strict=True)] = 4
    """needle_multi_*: number of needles. common_words: number of common words."""
    hops: Annotated[int, Field(ge=2, le=20, strict=True)] = 2
    """multi_hop: lines from the question to its answer. variable_tracking: assignments from variable to variable."""
    groups: Groups = None
    filler: Filler = None
    value_digits: ValueDigits = None
    examples: Positive | None = None
    """Prompts per size. By default `evaluate.examples`."""
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,99}$")] | None = None
    """Name in results. By default the task. Set it to list a task again with another `filler`, `value_digits`,
    `groups`, `hops` or `needles`."""

    @property
    def probe(self) -> Probe:
        """The probe that generates the prompts."""
        return PROBES[self.task]

    @property
    def result_name(self) -> str:
        """First part of its names in results."""
        return self.name or self.task

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"task": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _options_apply(self) -> EvaluationTask:
        options = self.probe.options
        accepted = {
            "task": True,
            "pairs": self.probe.pairs is not None and "tokens" not in options,
            "depths": "tokens" in options and self.probe.has_depth,
            "examples": self.probe.evaluation_set() is None,
            "name": self.probe.scoring != "perplexity",
        }
        for name in self.changed:
            if not accepted.get(name, name in options):
                raise ValueError(f"{self.task} does not use `{name}`: remove it")
        if self.name != self.task and (self.name in PROBES or self.name in _KEYS_OF_ARMS):
            raise ValueError(f"`name: {self.name}` has another meaning in results. Use another name")
        return self

    @model_serializer(mode="plain")
    def _short(self) -> str | dict[str, Any]:
        return self.changed if len(self.changed) > 1 else self.task


DEFAULT_TASKS = tuple(
    EvaluationTask(task=task)
    for task in (
        "kv_retrieval", "letter_choice", "option_text", "closed_book", "closed_book_seen", "perplexity",
        "perplexity_seen",
    )
)  # fmt: skip


# Tasks of the reproduced papers. Most of their data sets are on the Hub.
PAPER_TASKS = (
    "mmlu", "mmlu_continuation", "gsm8k", "bbh", "winogrande", "openbookqa", "piqa", "hellaswag", "arc_easy",
    "arc_challenge", "swde", "fda", "squad_completion", "ruler",
    # Of long contexts and reading, used for other hybrids.
    "drop", "nq_open", "triviaqa", "babilong", "infinitebench_kv_retrieval", "longbench_passage_retrieval_en",
)  # fmt: skip


class LmEval(Section):
    """Tasks of lm-eval. If the data of a task is not available, it is skipped and the results give the reason."""

    tasks: OneOrMore[str] = Field(PAPER_TASKS, min_length=1)
    """Tasks, groups or tags. `surgery_retrieval` is a group of this toolkit."""
    limit: Positive | None = None
    """Maximum number of documents per task, from the first. By default all."""
    num_fewshot: Annotated[int, Field(ge=0, le=1000, strict=True)] | None = None
    """Few-shot examples per prompt. By default those of the task."""
    batch_size: Positive = 8
    max_length: Positive | None = None
    """Maximum prompt length in tokens; longer ones are cut at the start. By default the config's limit."""
    max_seq_lengths: tuple[Positive, ...] | None = Field(None, min_length=1, examples=[[4096, 8192]])
    """ruler and babilong: lengths of the prompts in tokens; for babilong, multiples of 1024. By default 4096 for ruler,
    and babilong's prompts without distracting text (0k)."""

    @model_validator(mode="after")
    def _babilong_has_these_lengths(self) -> LmEval:
        if any(task.startswith("babilong") for task in self.tasks):
            for length in self.max_seq_lengths or ():
                if length % 1024:
                    raise ValueError(
                        f"`max_seq_lengths`: BABILong has multiples of 1024 tokens, not {length}. Change it, or list "
                        "`tasks` without babilong"
                    )
        return self


class Evaluate(Section):
    """Evaluate every arm on the same prompts."""

    pairs: PairsSizes = (4, 8, 16, 32, 48, 64)
    """Key-value pairs per prompt: a list of sizes, or one number."""
    examples: Positive = 400
    """Prompts for each number of pairs, and letter-choice questions."""
    sentences: Positive = 400
    """Sentences for perplexity."""
    batch_size: Positive = 64
    tasks: OneOrMore[EvaluationTask] = Field(DEFAULT_TASKS, min_length=1)
    """Tasks to evaluate: names, or names with sizes."""
    generate: Annotated[bool | OneOrMore[str], one_message("true, false, or a list of tasks")] = Field(
        False, examples=[["kv_retrieval"]]
    )
    """Also generate answers, besides ranking choices: `true` for all tasks, or a list of tasks."""
    lm_eval: LmEval | None = None
    """Also evaluate tasks of lm-eval."""
    efficiency: Efficiency | None = None
    """Also measure time and memory. By default not measured."""
    read_twice: bool = False
    """Also evaluate base and control on prompts that contain their text twice (Just Read Twice)."""

    @model_validator(mode="after")
    def _tasks_are_known(self) -> Evaluate:
        names = [entry.result_name for entry in self.tasks]
        if len(set(names)) < len(names):
            repeated = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"`tasks` lists {repeated} twice. List it once, with several sizes, or set `name` of one.")
        listed = self.generate if isinstance(self.generate, tuple) else ()
        with_answers = {entry.result_name for entry in self.tasks if entry.probe.scoring != "perplexity"}
        unknown = sorted(set(listed) - with_answers)
        if unknown:
            raise ValueError(f"`generate` lists {unknown[0]}, which is not among the `tasks` with answers. Remove it")
        for entry in self.tasks:
            if entry.probe.pairs is not None and "tokens" not in entry.probe.options:
                sizes = entry.pairs or self.pairs
                entry.probe.check_pairs(*sizes)
                check_value_digits(max(sizes), entry.value_digits)
        return self

    @property
    def probes(self) -> dict[str, str]:
        """Name of the probe by name in results."""
        return {entry.result_name: entry.task for entry in self.tasks}

    def generates(self, task: str) -> bool:
        """Whether the answers of the task with this name in results are generated too."""
        return self.generate if isinstance(self.generate, bool) else task in self.generate
