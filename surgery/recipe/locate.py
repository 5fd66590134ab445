"""Schema of the section `locate`: how every head is measured. See docs/LOCATE.md."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from surgery.probes.registry import PROBES, Options, Probe
from surgery.recipe.methods import METHODS, RANKINGS, UNRANKED
from surgery.recipe.section import Filler, OneOrMore, OnePairs, Positive, Section, ValueDigits, check_value_digits
from surgery.recipe.sources import AUTO, Data
from surgery.registry import NameOf
from surgery.types import Fill, Where

Method = Annotated[str, NameOf(METHODS)]
Select = Annotated[str, NameOf(RANKINGS, extra=tuple(UNRANKED))]


def _locates(probe: Probe) -> bool:
    """Whether heads can be measured on a probe: its answers are ranked, and their places in the prompt are known."""
    sized = probe.pairs is not None and "tokens" not in probe.options
    return sized and probe.gold_position and probe.scoring == "choices"


def _with_places(value: Any) -> Any:
    return {"path": value, "columns": {"answer_span": AUTO}} if isinstance(value, str) else value


OwnPrompts = Annotated[Data, BeforeValidator(_with_places, json_schema_input_type=str | Data)]
LocatedTask = Annotated[str, NameOf(PROBES, keep=_locates)]


class Locate(Section):
    """Measure every head: exact ablation, roles by position, patching, and oracle reads (`sharpen`)."""

    methods: OneOrMore[Method] = Field(("ablation", "query", "context", "patching", "sharpen"), min_length=1)
    """Measurements of every head (docs/LOCATE.md). `patching` ranks heads for the default `splice.select`. `sharpen`,
    the oracle read, finds the position that training supervises. [query, patching, sharpen] needs one decode step per
    head and column, which suits large models on small machines."""
    task: LocatedTask = "kv_retrieval"
    """Probe that generates the prompts. Choose one that the base can answer."""
    pairs: OnePairs = 24
    """Key-value pairs per prompt: one number, which the base answers. Few are faster."""
    filler: Filler = None
    """Range of the number of words between a key and its value. By default no words."""
    value_digits: ValueDigits = None
    """Range of the number of digits of a prompt's values. By default integers 0-99."""
    examples: Positive = 128
    """Number of prompts. With `data`, the largest number of rows."""
    data: OwnPrompts | None = None
    """Your own prompts, with the place of each answer. A path alone has `answer_span: auto`. By default key-value
    prompts are generated."""
    generated: int = Field(0, ge=0, le=10**9, strict=True)
    """With `data`: number of generated prompts to measure as well."""
    batch_size: Positive = 32
    """Prompts per batch."""
    where: Where = "everywhere"
    """Tokens at which `ablation` removes a head."""
    fill: Fill = "zero"
    """Replacement for the output of an ablated head: zeros, its mean over the prompts, or its output on another
    prompt."""
    layers: bool = False
    """Also measure each layer as a whole."""
    top_k: Positive = 12
    """Best heads that are candidates for the second and further chosen heads."""
    method_options: dict[str, Any] = Field({}, examples=[{"my_method": {"layers": 4}}])
    """Options of methods of plugins, by method: `{NAME: {KEY: VALUE}}`. By default those of the method."""

    @field_validator("methods")
    @classmethod
    def _once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError("A method is listed twice. List each once.")
        return value

    @field_validator("method_options")
    @classmethod
    def _known_options(cls, value: dict[str, Any]) -> dict[str, Any]:
        options = {}
        for name, given in value.items():
            kind = METHODS[name].options if name in METHODS else None
            if kind is None:
                raise ValueError(f"The method {name} has no options. Remove `{name}`.")
            try:
                options[name] = kind.model_validate(given)
            except ValidationError as error:
                fault = error.errors()[0]
                key = ".".join(map(str, (name, *fault["loc"])))
                raise ValueError(f"{key}: {fault['msg']}. Keys: {', '.join(kind.model_fields)}.") from error
        return options

    @model_validator(mode="after")
    def _parts_fit(self) -> Locate:
        uneven = self.data is None and self.examples % self.batch_size == 1  # of own prompts there may be fewer
        if self.fill != "zero" and (self.batch_size == 1 or uneven):
            raise ValueError("`fill: mean` and `resample` need two prompts in every batch. Change `batch_size`.")
        for method in self.method_options:
            if method not in self.methods:
                raise ValueError(f"`method_options` has options of {method}: add it to `methods`.")
        check_value_digits(self.pairs, self.value_digits)
        self.probe.check_pairs(self.pairs)
        for name in ("filler", "value_digits"):
            if getattr(self, name) is not None and name not in self.probe.options:
                raise ValueError(f"{self.task} does not use `{name}`: remove it")
        if self.data is None and self.generated:
            raise ValueError("`generated` needs `data`. Without it all prompts are generated: set `examples`.")
        if self.data is not None and self.data.columns.text is not None:
            raise ValueError("`data` has plain text, which asks nothing. Use columns of prompts and answers.")
        if self.data is not None and self.data.columns.answer_span is None:
            raise ValueError(
                "`data` needs the place of each answer. Set `data.columns.answer_span` to a column or `auto`."
            )
        return self

    @property
    def probe(self) -> Probe:
        """The probe that generates the prompts."""
        return PROBES[self.task]

    def options(self, pairs: int = 0, tokenizer: Any = None) -> Options:
        """Sizes of one prompt.

        Args:
            pairs: replaces `pairs` if it is not 0.
            tokenizer: the base's, for probes whose text depends on it.
        """
        return Options(
            pairs=pairs or self.pairs, filler=self.filler, value_digits=self.value_digits, tokenizer=tokenizer
        )

    def options_of(self, method: str) -> Any:
        """Options of a method: those of the recipe, otherwise the defaults. None for a method without options."""
        kind = METHODS[method].options
        return self.method_options.get(method, None if kind is None else kind())
