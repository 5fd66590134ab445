"""Schema of the section `locate`: how every head is measured. See docs/LOCATE.md."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator

from surgery.probes.registry import PROBES, Options, Probe
from surgery.recipe.methods import METHODS, RANKINGS, UNRANKED
from surgery.recipe.section import Filler, OneOrMore, OnePairs, Positive, Section, ValueDigits, check_value_digits
from surgery.recipe.sources import AUTO, Data
from surgery.registry import NameOf
from surgery.types import Fill, Where

Method = Annotated[str, NameOf(METHODS)]
Select = Annotated[str, NameOf(RANKINGS, extra=tuple(UNRANKED))]
UntrainedRanking = Annotated[str, NameOf(RANKINGS, keep=lambda method: not method.trains)]


def _locates(probe: Probe) -> bool:
    """Whether heads can be measured on a probe: its answers are ranked, and their places in the prompt are known."""
    sized = probe.pairs is not None and "tokens" not in probe.options
    return sized and probe.gold_position and probe.scoring == "choices"


def _with_places(value: Any) -> Any:
    return {"path": value, "columns": {"answer_span": AUTO}} if isinstance(value, str) else value


OwnPrompts = Annotated[Data, BeforeValidator(_with_places, json_schema_input_type=str | Data)]
LocatedTask = Annotated[str, NameOf(PROBES, keep=_locates)]


class Search(Section):
    """Stop measuring heads that cannot be among the best."""

    first: Positive = Field(
        32, description="Prompts before the first heads are dropped. Each further round doubles the number."
    )
    risk: float = Field(
        0.05, gt=0, lt=1, description="Probability of dropping one of the best heads, over the whole search."
    )


class Training(Section):
    """Short training of candidate heads on the frozen base, on prompts of the training split."""

    lr: float = Field(6e-3, gt=0, le=1, description="Learning rate of the candidates' attention branches.")
    rows: Positive = Field(16, description="Training documents per step, each with up to 4 questions.")
    candidates_by: UntrainedRanking = Field(
        "sharpen",
        description="Value of `splice.select` whose best heads are the candidates. `patching` suits bases on which "
        "the oracle read misleads.",
    )

    def num_steps(self, candidates: int, keep: int) -> int:
        """Training steps of all candidates together, for progress bars."""
        raise NotImplementedError


class Gates(Training):
    """Train all candidate heads together, each behind a gate that costs something while it is open."""

    candidates: Positive = Field(12, description="Heads that are trained. All of them are in memory together.")
    steps: Positive = Field(80, description="Training steps.")
    gate_lr: float = Field(0.1, gt=0, le=10, description="Learning rate of the gates.")
    cost: float = Field(
        0.02, ge=0, description="Cost of an open head, in nats of the answer loss. A larger cost closes more gates."
    )

    def num_steps(self, candidates: int, keep: int) -> int:
        return self.steps


class Trial(Training):
    """Train candidate heads one at a time, and drop the worse half after each round."""

    candidates: Positive = Field(8, description="Heads that are tried.")
    steps: Positive = Field(
        32, description="Training steps of the first round. Each further round doubles the steps trained so far."
    )
    greedy: bool = Field(
        False,
        description="With several heads to choose: try the second and further ones together with those already "
        "chosen. By default the heads that are left after the last round are chosen.",
    )

    def rounds(self, candidates: int, keep: int) -> list[tuple[int, int]]:
        """Schedule of successive halving (Karnin et al. 2013): the worse half is dropped until `keep` are left.

        Returns:
            For each round, the number of candidates in it and the steps that each has been trained by its end.
        """
        counts = [candidates]
        while counts[-1] > keep:
            counts.append(max(keep, -(-counts[-1] // 2)))
        in_rounds = counts[:-1] or counts  # the last count is what remains after the last round
        return [(count, self.steps * 2**index) for index, count in enumerate(in_rounds)]

    def stages(self, candidates: int, keep: int) -> list[list[tuple[int, int]]]:
        """Schedules of the halvings: one that keeps all heads to choose or, with `greedy`, one for each of them.

        All of them have the same number of rounds, so that sets of different sizes train for equally many steps.
        """
        if not self.greedy:
            return [self.rounds(candidates, keep)]
        whole = self.rounds(candidates, 1)
        return [
            [(min(count, candidates - taken), steps) for count, steps in whole]
            for taken in range(min(keep, candidates))
        ]

    def num_steps(self, candidates: int, keep: int) -> int:
        total = 0
        for rounds in self.stages(candidates, keep):
            before = 0
            for count, steps in rounds:
                total += count * (steps - before)
                before = steps
        return total


class Locate(Section):
    """Measure every head: exact ablation, roles by position, oracle reads (`sharpen`), and baselines."""

    methods: OneOrMore[Method] = Field(
        ("ablation", "query", "context", "patching", "sharpen"),
        min_length=1,
        description="Measurements of every head (docs/LOCATE.md). `patching` ranks heads for the default "
        "`splice.select`. `sharpen`, the oracle read, finds the position that training supervises. [query, patching, "
        "sharpen] needs one decode step per head and column, which suits large models on small machines. `gates` and "
        "`trial` train candidates, and add `sharpen`.",
    )
    task: LocatedTask = Field(
        "kv_retrieval",
        description="Probe that generates the prompts. Choose one that the base can answer. `hidden_attention` needs "
        "kv_retrieval.",
    )
    pairs: OnePairs = Field(
        24,
        description="Key-value pairs per prompt: one number. Choose it so that the base scores 0.6-0.95.",
    )
    filler: Filler | None = Field(
        None, description="Range of the number of words between a key and its value. By default no words."
    )
    value_digits: ValueDigits | None = Field(
        None, description="Range of the number of digits of a prompt's values. By default integers 0-99."
    )
    examples: Positive = Field(128, description="Number of prompts. With `data`, the largest number of rows.")
    data: OwnPrompts | None = Field(
        None,
        description="Your own prompts, with the place of each answer. A path alone has `answer_span: auto`. By default "
        "key-value prompts are generated.",
    )
    generated: int = Field(
        0, ge=0, le=10**9, strict=True, description="With `data`: number of generated prompts to measure as well."
    )
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
    gates: Gates = Field(Gates(), description="With `gates` in `methods`: budget of the training.")
    trial: Trial = Field(Trial(), description="With `trial` in `methods`: budget of the training.")

    @field_validator("methods")
    @classmethod
    def _once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError("A method is listed twice. List each once.")
        if any(METHODS[method].trains for method in value) and "sharpen" not in value:
            return (*value, "sharpen")  # it measures the position that each candidate reads
        return value

    @model_validator(mode="after")
    def _parts_fit(self) -> Locate:
        if self.fill != "zero" and (self.batch_size == 1 or self.examples % self.batch_size == 1):
            raise ValueError("`fill: mean` and `resample` need two prompts in every batch. Change `batch_size`.")
        if self.search is not None and not any(METHODS[method].ranks for method in self.methods):
            raise ValueError("`search` needs a method that ranks heads, such as ablation or sharpen.")
        if self.backups and "ablation" not in self.methods:
            raise ValueError("`backups` needs `ablation` in `methods`.")
        for method in self.trained:
            ranking = self.candidates_by(method)
            if RANKINGS[ranking].name not in self.methods:
                raise ValueError(f"`{method}.candidates_by: {ranking}` needs `{RANKINGS[ranking].name}` in `methods`.")
        if self.backups > self.top_k:
            raise ValueError("`backups` must not exceed `top_k`: it takes heads from the best `top_k`.")
        check_value_digits(self.pairs, self.value_digits)
        return self

    @model_validator(mode="after")
    def _task_takes_these(self) -> Locate:
        probe = PROBES[self.task]
        probe.check_pairs(self.pairs)
        for name in ("filler", "value_digits"):
            if getattr(self, name) is not None and name not in probe.options:
                raise ValueError(f"{self.task} does not use `{name}`: remove it")
        if self.task != "kv_retrieval" and "hidden_attention" in self.methods:
            raise ValueError("the method hidden_attention needs `task: kv_retrieval`. Remove the method")
        return self

    @property
    def probe(self) -> Probe:
        """The probe that generates the prompts."""
        return PROBES[self.task]

    def options(self, pairs: int = 0, questions: int = 1, tokenizer: Any = None) -> Options:
        """Sizes of one prompt.

        Args:
            pairs: replaces `pairs` if it is not 0.
            questions: maximum number of questions.
            tokenizer: the base's, for probes whose text depends on it.
        """
        return Options(
            pairs=pairs or self.pairs,
            questions=questions,
            filler=self.filler,
            value_digits=self.value_digits,
            tokenizer=tokenizer,
        )

    @model_validator(mode="after")
    def _data_has_places(self) -> Locate:
        if self.data is None and self.generated:
            raise ValueError("`generated` needs `data`. Without it all prompts are generated: set `examples`.")
        if self.data is not None and self.data.columns.text is not None:
            raise ValueError("`data` has plain text, which asks nothing. Use columns of prompts and answers.")
        if self.data is not None and "hidden_attention" in self.methods:
            raise ValueError("the method hidden_attention needs generated dictionaries. Remove the method or `data`")
        if self.data is not None and self.data.columns.answer_span is None:
            raise ValueError(
                "`data` needs the place of each answer. Set `data.columns.answer_span` to a column or `auto`."
            )
        return self

    @property
    def per_batch(self) -> tuple[str, ...]:
        """Methods that score one batch of prompts after the other."""
        return tuple(method for method in self.methods if not METHODS[method].trains)

    @property
    def trained(self) -> tuple[str, ...]:
        """Methods that train candidates."""
        return tuple(method for method in self.methods if METHODS[method].trains)

    def candidates_of(self, method: str) -> int:
        """Number of heads that a method trains. A plugin's method has no section, and trains as many as `gates`."""
        budget = getattr(self, method, None)
        return budget.candidates if isinstance(budget, Gates | Trial) else self.gates.candidates

    def candidates_by(self, method: str) -> str:
        """The ranking whose best heads a method trains; `sharpen` for a plugin's method, which has no section."""
        budget = getattr(self, method, None)
        return budget.candidates_by if isinstance(budget, Gates | Trial) else "sharpen"

    def training_steps(self, method: str, heads: int, keep: int) -> int:
        """Training steps of a method, for progress bars.

        Args:
            method: a method that trains; 0 for one of a plugin.
            heads: number of heads that can be spliced.
            keep: number of heads to choose.
        """
        budget = getattr(self, method, None)
        return budget.num_steps(min(budget.candidates, heads), keep) if isinstance(budget, Gates | Trial) else 0
