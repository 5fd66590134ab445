"""The tasks of an evaluation, and how they are run."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_serializer, model_validator

from surgery.recipe.locate import Asked
from surgery.recipe.section import Pairs, Positive, Section


class Efficiency(Section):
    """What every arm costs to run, beside the base and a Transformer of the same width."""

    lengths: tuple[Positive, ...] = Field((128, 1024), min_length=1, description="Tokens of a prompt.")
    batch_sizes: tuple[Positive, ...] = Field((1,), min_length=1, description="Prompts at once.")
    new_tokens: Positive = Field(16, description="Tokens that are written after each.")
    repeats: Positive = Field(5, description="Timings of each model and size, in turn; their median counts.")
    transformer: bool = Field(
        True, description="Also a Transformer of random weights, as wide and deep, with as many parameters."
    )


OF_PAIRS = ("kv_retrieval", "mqar", "phonebook", "json_kv", "multi_hop", "copying")


TEXTS = ("perplexity", "perplexity_seen")


class Probe(Section):
    """One task that every arm is asked, at one size or several. docs/EVALUATE.md shows each."""

    task: Asked
    pairs: tuple[Pairs, ...] | None = Field(
        None, min_length=1, description="Pairs of a prompt, pieces of copying; those of `evaluate.pairs` if not said."
    )
    tokens: tuple[Positive, ...] = Field(
        (512,), min_length=1, description="needle_*: the longest that a prompt may be."
    )
    depths: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(
        (0.0, 0.25, 0.5, 0.75, 1.0), min_length=1, description="needle_*: share of the text before the needle."
    )
    needles: Annotated[int, Field(ge=2, le=16, strict=True)] = Field(4, description="needle_multi_*: hidden numbers.")
    hops: Annotated[int, Field(ge=2, le=20, strict=True)] = Field(2, description="multi_hop: lines to the number.")
    examples: Positive | None = Field(None, description="Prompts of each size; as many as `evaluate.examples` says.")

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"task": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _sizes_have_a_meaning(self) -> Probe:
        of_needles = self.task.startswith("needle_")
        meant = {
            "task": True,
            "pairs": self.task in OF_PAIRS,
            "tokens": of_needles,
            "depths": of_needles,
            "needles": self.task.startswith("needle_multi"),
            "hops": self.task == "multi_hop",
            "examples": not self.task.startswith("closed_book"),
        }
        for name in self._said():
            if not meant[name]:
                raise ValueError(f"{self.task} has no `{name}`")
        return self

    def _said(self) -> dict[str, Any]:
        """What is not as it would be anyway."""
        fields = type(self).model_fields
        return {name: getattr(self, name) for name in fields if getattr(self, name) != fields[name].default}

    @model_serializer(mode="plain")
    def _short(self) -> str | dict[str, Any]:
        said = self._said()
        return said if len(said) > 1 else self.task


TODAY = tuple(
    Probe(task=task)
    for task in ("kv_retrieval", "letter_choice", "option_text", "closed_book", "closed_book_seen", *TEXTS)
)


# Of the papers that this toolkit starts from; what of them can be had where it runs is another matter.
PAPER_TASKS = (
    "mmlu", "mmlu_continuation", "gsm8k", "bbh", "winogrande", "openbookqa", "piqa", "hellaswag", "arc_easy",
    "arc_challenge", "swde", "fda", "squad_completion", "ruler",
)  # fmt: skip


class LmEval(Section):
    """Tasks of lm-eval. One whose data cannot be had is skipped, and the result says why."""

    tasks: tuple[str, ...] = Field(
        PAPER_TASKS, min_length=1, description="Tasks, groups or tags; `surgery_retrieval` is this toolkit's own."
    )
    limit: Positive | None = Field(None, description="Documents of each task, from the first; all if not said.")
    num_fewshot: Annotated[int, Field(ge=0, le=1000, strict=True)] | None = Field(
        None, description="The task's own if not said."
    )
    batch_size: Positive = 8
    max_length: Positive | None = Field(
        None,
        description="The longest prompt in tokens; longer ones lose their beginning. The config's limit if not said.",
    )


class Evaluate(Section):
    """Every arm on the same prompts."""

    pairs: tuple[Pairs, ...] = Field((4, 8, 16, 32, 48, 64), min_length=1)
    examples: Positive = Field(400, description="Prompts for each number of pairs, and letter-choice questions.")
    sentences: Positive = Field(400, description="Sentences for perplexity.")
    batch_size: Positive = 64
    tasks: tuple[Probe, ...] = Field(TODAY, min_length=1, description="What is asked: names, or names with sizes.")
    generate: bool | tuple[str, ...] = Field(
        False, description="Also whether the answer is said, not chosen: for all tasks, or for these."
    )
    lm_eval: LmEval | None = Field(None, description="Tasks of lm-eval too.")
    efficiency: Efficiency | None = Field(None, description="Time and memory too; not measured if not said.")

    @model_validator(mode="after")
    def _tasks_are_known(self) -> Evaluate:
        names = [probe.task for probe in self.tasks]
        if len(set(names)) < len(names):
            raise ValueError("the same task is listed twice; give it several sizes instead")
        said = self.generate if isinstance(self.generate, tuple) else ()
        unknown = sorted(set(said) - (set(names) - set(TEXTS)))
        if unknown:
            raise ValueError(f"`generate` names {unknown[0]}, which is not among the `tasks` that have answers")
        return self

    def says(self, task: str) -> bool:
        """Whether this task's answers are generated too."""
        return self.generate if isinstance(self.generate, bool) else task in self.generate
