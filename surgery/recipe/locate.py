"""Schema of the section `locate`: how every head is measured. See docs/LOCATE.md."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, field_validator, model_validator

from surgery.recipe.methods import METHODS, RANKINGS, UNRANKED
from surgery.recipe.section import Filler, Pairs, Positive, Section, ValueDigits, check_value_digits
from surgery.registry import NameOf
from surgery.types import Fill, Where

Method = Annotated[str, NameOf(METHODS)]
Select = Annotated[str, NameOf(RANKINGS, extra=UNRANKED)]


class Search(Section):
    """Stop measuring heads that cannot be among the best."""

    first: Positive = Field(
        32, description="Prompts before the first heads are dropped. Each further round doubles the number."
    )
    risk: float = Field(
        0.05, gt=0, lt=1, description="Probability of dropping one of the best heads, over the whole search."
    )


class Locate(Section):
    """Measure every head: exact ablation, roles by position, oracle reads (`sharpen`), and baselines."""

    methods: tuple[Method, ...] = Field(
        ("ablation", "query", "context", "sharpen"),
        min_length=1,
        description="Measurements of every head (docs/LOCATE.md). `sharpen` is the oracle read. [query, sharpen] needs "
        "one decode step per head, which suits large models on small machines.",
    )
    pairs: Pairs = Field(24, description="Key-value pairs per prompt. Choose it so that the base scores 0.6-0.95.")
    filler: Filler | None = Field(
        None, description="Range of the number of words between a key and its value. By default no words."
    )
    value_digits: ValueDigits | None = Field(
        None, description="Range of the number of digits of a prompt's values. By default integers 0-99."
    )
    examples: Positive = Field(128, description="Number of prompts.")
    batch_size: Positive = Field(32, description="Prompts per batch.")
    where: Where = Field("everywhere", description="Tokens at which `ablation` removes a head.")
    fill: Fill = Field(
        "zero",
        description="Replacement for the output of an ablated head: zeros, its mean over the prompts, or its output on "
        "another prompt.",
    )
    layers: bool = Field(False, description="Also measure each layer as a whole.")
    search: Search | None = Field(None, description="Stop measuring heads that cannot be among the best.")
    top_k: Positive = Field(12, description="Best heads that are candidates for the second and further chosen heads.")
    backups: int = Field(
        0, ge=0, le=10**9, strict=True, description="Redundancy: number of heads to ablate cumulatively, the most "
        "important first. Pairs of Gather and Aggregate heads are ablated too. By default not measured."
    )  # fmt: skip
    new_keys: ClassVar[tuple[str, ...]] = ("filler", "value_digits")

    @field_validator("methods")
    @classmethod
    def _once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError("A method is listed twice. List each once.")
        return value

    @model_validator(mode="after")
    def _parts_fit(self) -> Locate:
        if self.fill != "zero" and (self.batch_size == 1 or self.examples % self.batch_size == 1):
            raise ValueError("`fill: mean` and `resample` need two prompts in every batch. Change `batch_size`.")
        if self.search is not None and not any(METHODS[method].ranks for method in self.methods):
            raise ValueError("`search` needs a method that ranks heads, such as ablation or sharpen.")
        if self.backups and "ablation" not in self.methods:
            raise ValueError("`backups` needs `ablation` in `methods`.")
        if self.backups > self.top_k:
            raise ValueError("`backups` must not exceed `top_k`: it takes heads from the best `top_k`.")
        check_value_digits(self.pairs, self.value_digits)
        return self
