"""The part of a recipe that says what is measured, and what a choice of heads needs. Owns: its schema.

Must never know: torch, models, how a measurement is made (locate). docs/LOCATE.md explains the methods.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_serializer, model_validator

from surgery.sections import Pairs, Positive, Section
from surgery.types import Fill, Where

Method = Literal[
    "ablation", "query", "context", "sharpen", "hidden_attention", "attribution", "integrated_gradients",
    "layer_divergence", "retrieval_score",
]  # fmt: skip
Select = Literal[
    "sharpen", "aggregate", "gather", "ablation", "attribution", "integrated_gradients", "layer_divergence",
    "random", "uniform", "list",
]  # fmt: skip
# What has to be measured for a choice.
NEEDS: dict[str, str] = {
    "sharpen": "sharpen", "aggregate": "query", "gather": "context", "ablation": "ablation",
    **{name: name for name in ("attribution", "integrated_gradients", "layer_divergence")},
}  # fmt: skip


class Search(Section):
    """Heads that cannot be among the best are measured on few prompts."""

    first: Positive = Field(
        32, description="Prompts before the first heads are dropped; then twice as many, and so on."
    )
    risk: float = Field(0.05, gt=0, lt=1, description="Of dropping one of the best heads, over the whole search.")


class Locate(Section):
    """Where to operate: exact ablation of every head, roles by position, the sharpen test, and their rivals."""

    methods: tuple[Method, ...] = Field(
        ("ablation", "query", "context", "sharpen"),
        min_length=1,
        description="What is measured of every head: docs/LOCATE.md. [query, sharpen] is all that one decode step "
        "shows, for large models on small machines.",
    )
    pairs: Pairs = Field(24, description="Key-value pairs a prompt. Choose it so that the base is at 0.6-0.95.")
    examples: Positive = Field(128, description="Prompts.")
    batch_size: Positive = Field(32, description="Prompts at once.")
    where: Where = Field("everywhere", description="Tokens at which `ablation` removes a head.")
    fill: Fill = Field(
        "zero", description="What takes its place: nothing, its mean over the prompts, another prompt's."
    )
    layers: bool = Field(False, description="Measure each layer as a whole beside its heads.")
    search: Search | None = Field(None, description="Stop measuring heads that cannot be among the best.")
    top_k: Positive = Field(12, description="Heads that stay candidates for the second and further choices.")
    backups: int = Field(
        0, ge=0, le=10**9, strict=True, description="How many of the most necessary heads to take away one after the "
        "other, each given those before, and to try in pairs of Gather and Aggregate."
    )  # fmt: skip

    @field_validator("methods")
    @classmethod
    def _once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError("the same method is listed twice")
        return value

    @model_validator(mode="after")
    def _parts_fit(self) -> Locate:
        if self.fill != "zero" and (self.batch_size == 1 or self.examples % self.batch_size == 1):
            raise ValueError("`fill: mean` and `resample` take from the other prompts of a batch: change `batch_size`")
        if self.search is not None and not set(NEEDS.values()) & set(self.methods):
            raise ValueError("`search` needs a method that ranks heads, such as ablation or sharpen")
        if self.backups and "ablation" not in self.methods:
            raise ValueError("`backups` needs `ablation` among the methods")
        if self.backups > self.top_k:
            raise ValueError("`backups` are taken from the best `top_k` heads; ask for no more than those")
        return self


class Efficiency(Section):
    """What every arm costs to run, beside the base and a Transformer of the same width."""

    lengths: tuple[Positive, ...] = Field((128, 1024), min_length=1, description="Tokens of a prompt.")
    batch_sizes: tuple[Positive, ...] = Field((1,), min_length=1, description="Prompts at once.")
    new_tokens: Positive = Field(16, description="Tokens that are written after each.")
    repeats: Positive = Field(5, description="Timings of each model and size, in turn; their median counts.")
    transformer: bool = Field(
        True, description="Also a Transformer of random weights, as wide and deep, with as many parameters."
    )


Asked = Literal[
    "kv_retrieval", "mqar", "phonebook", "json_kv", "multi_hop", "copying", "needle_single", "needle_multi_key",
    "needle_multi_value", "needle_multi_query", "letter_choice", "option_text", "closed_book", "closed_book_seen",
    "perplexity", "perplexity_seen",
]  # fmt: skip
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
