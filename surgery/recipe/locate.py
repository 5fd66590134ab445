"""The part of a recipe that says what is measured, and what a choice of heads needs. Owns: its schema.

Must never know: torch, models, how a measurement is made (locate). docs/LOCATE.md explains the methods.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from surgery.recipe.section import Pairs, Positive, Section
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
