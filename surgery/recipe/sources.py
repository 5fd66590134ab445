"""Schema of `train.sources`: what a training step consists of, and the weight of each objective on it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, GetJsonSchemaHandler, TypeAdapter, model_validator
from pydantic_core import CoreSchema

from surgery.probes.registry import PROBES, Probe
from surgery.recipe.objectives import OBJECTIVES, needs_of
from surgery.recipe.section import (
    Filler,
    Groups,
    PairsRange,
    Positive,
    Section,
    ValueDigits,
    check_value_digits,
    one_message,
)
from surgery.registry import NameOf

Weight = Annotated[float, Field(ge=0)]


# Constant, or [first, last] with a linear change over the stage.
Scheduled = Annotated[
    Weight | tuple[Weight, Weight], one_message("a number of 0 or more, or a list [first, last] of two such numbers")
]
Task = Annotated[str, NameOf(PROBES, keep=lambda probe: probe.trains)]
AUTO, _SPANS = "auto", "answer_span"  # value of `answer_span`, and the column that it reads where there is one
DEFAULT_ROWS = 8
# Of a task whose answers stand in the prompt. `attention`: answers alone teach a new head little.
DEFAULT_WEIGHTS = {"answer": 2.0, "attention": 1.0}
DATA_FORMATS = (".jsonl", ".json", ".parquet")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class Weights(Section):
    """Weight of each objective on the documents of one source. [first, last] changes it linearly over the stage."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[Annotated[str, NameOf(OBJECTIVES)], Scheduled] = Field(init=False)

    def at(self, progress: float) -> dict[str, float]:
        """Weights of the objectives in use, in the order of their registration.

        Args:
            progress: position in the stage, from 0 to 1.
        """
        weights = {}
        for name in OBJECTIVES:
            value = (self.model_extra or {}).get(name, 0.0)
            first, last = value if isinstance(value, tuple) else (value, value)
            if first or last:
                weights[name] = first + (last - first) * progress
        return weights

    def uses(self, *names: str) -> bool:
        """Whether one of these objectives has a weight at any time."""
        return bool(self.at(0.5).keys() & set(names))

    def needs(self, *needs: str) -> bool:
        """Whether an objective that has a weight needs one of these, such as `base.logits`."""
        return bool(needs_of(self.at(0.5)) & set(needs))

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        value = TypeAdapter(Scheduled).json_schema()
        properties = {
            name: {**value, "default": 0.0, "description": entry.description} for name, entry in OBJECTIVES.items()
        }
        return {**handler(schema), "properties": properties, "additionalProperties": False}


class Columns(Section):
    """Columns to read: `text`, `messages`, or `prompt` and `answer`."""

    prompt: str = "prompt"
    """Column of the prompt, including spaces and newlines before the answer."""
    answer: str = "answer"
    """Column of the answer. The objective `answer` trains on these tokens only."""
    answer_span: str | None = None
    """Column of the answer's place in the prompt, [start, end) in characters. Spliced heads are trained to attend to
    it. `auto`: use the column `answer_span` of rows that have it. In other rows, find the place where the answer occurs
    exactly once. Rows without such a place train without attention supervision."""
    text: str | None = None
    """Column of plain text, for `lm`, `base_kl` and `distil`. Replaces `prompt` and `answer`."""
    messages: str | None = None
    """Column of a chat whose last message is the answer. Requires a tokenizer with a chat template."""

    @property
    def finds_spans(self) -> bool:
        """Whether the answer is searched in the prompts of rows without a span."""
        return self.answer_span == AUTO

    @property
    def span_column(self) -> str | None:
        """Column of spans. If `finds_spans`, rows may lack it."""
        return _SPANS if self.finds_spans else self.answer_span

    @model_validator(mode="after")
    def _one_form(self) -> Columns:
        if self.text is not None and self.messages is not None:
            raise ValueError("set `text` or `messages`, not both")
        return self


class Data(Section):
    """The user's own documents."""

    path: str
    """JSONL or Parquet file, a folder of such files, or the id of a data set on the Hub."""
    name: str | None = None
    """Configuration of a Hub data set."""
    split: str = "train"
    """Split of a Hub data set, or of a folder with several splits."""
    revision: str | None = None
    """Branch, tag or commit of a Hub data set."""
    columns: Columns = Columns()
    chat_template: bool = False
    """Format prompt and answer as a user's and an assistant's message by the chat template."""
    end: bool = True
    """Append the end-of-text token to every answer and text, and train on it."""
    streaming: bool = False
    """Read the data during training, shuffled within a buffer, instead of before training."""
    buffer: Positive = 1000
    """Rows in the shuffle buffer. Used with `streaming`."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Stop at a row that cannot be used, or skip and count it."""
    holdout: float = Field(0.0, ge=0, lt=1)
    """Share of the prompts to hold out from training. The evaluation uses them."""

    @property
    def is_on_hub(self) -> bool:
        """Whether the path is `owner/name` on the Hub rather than a local path, which may not exist any more."""
        path = Path(os.path.expanduser(self.path))
        is_file = path.exists() or path.suffix.lower() in DATA_FORMATS
        return not is_file and _HUB_ID.fullmatch(self.path) is not None

    @property
    def public_name(self) -> str:
        """Name in results and on cards: the id on the Hub, or the last part of a local path."""
        return self.path if self.is_on_hub else Path(os.path.abspath(os.path.expanduser(self.path))).name

    @property
    def holds_out_by(self) -> tuple[object, ...]:
        """What decides whether a row is held out: the share, and the columns whose content is hashed."""
        columns = self.columns
        if columns.text is not None:
            return self.holdout, "text", columns.text, self.end
        if columns.messages is not None:
            return self.holdout, "messages", columns.messages
        return self.holdout, "prompt", columns.prompt

    def may_share_rows(self, other: Data) -> bool:
        """Whether both name the same data set, or a folder and something inside it."""
        if self.is_on_hub or other.is_on_hub:
            return self.place == other.place
        mine, others = Path(self.place), Path(other.place)
        return mine.is_relative_to(others) or others.is_relative_to(mine)

    @property
    def place(self) -> str:
        """The id on the Hub, or the absolute path without symbolic links: one string for all spellings of a path."""
        return self.path if self.is_on_hub else os.path.realpath(os.path.expanduser(self.path))


class Source(Section):
    """Documents that one task or one data set contributes to every step. The mixture follows from the sizes."""

    task: Task | None = Field(None, examples=["kv_retrieval"])
    """Probe that generates the documents. Set this, `data` or `base_text`."""
    data: Data | None = None
    """The user's own documents."""
    base_text: Positive | None = Field(None, examples=[64])
    """Number of texts of `max_tokens` tokens that the base writes before training, sampled at temperature 1. With
    `base_kl` the hybrid keeps what the base predicts on text of its own kind."""
    rows: Positive | None = Field(
        None, description=f"Documents per step, over all processes. {DEFAULT_ROWS} if neither this nor `tokens` is set."
    )
    tokens: Positive | None = None
    """Maximum number of tokens per step. As many documents are taken as fit, at least one."""
    max_tokens: Positive | None = None
    """data: maximum tokens of a document. Longer texts are cut into pieces; a longer prompt is a bad row. base_text:
    tokens of a text. needle_*: maximum tokens up to the end of the last answer."""
    pairs: PairsRange = (2, 16)
    """Range [low, high] from which each step draws one number, or one number: lines for kv_retrieval, phonebook,
    json_kv, mqar, multi_hop, records, key_echo and kv_repeated; hidden numbers for needle_multi_*; pieces for
    copying."""
    questions: Positive = 1
    """kv_retrieval, phonebook, json_kv, mqar, records: maximum number of questions per document."""
    groups: Groups = None
    filler: Filler = None
    value_digits: ValueDigits = None
    train_eos: bool = False
    """Also train on the newline after each answer of a task, so that generation stops there."""
    split: Literal[0, 1] | None = None
    """closed_book, statement, letter_choice, option_text, sentence: use this half only. By default both. `closed_book`
    evaluates half 1, so train on 0; otherwise reports mark it as seen in training. `option_text` evaluates both halves,
    and is marked with either."""
    weights: Weights = Field(Weights(), examples=[{"answer": 1.0}])
    """Weight of each objective. By default {answer: 2.0, attention: 1.0} for a task whose answers stand in the prompt.
    Other sources have to set it."""

    @model_validator(mode="before")
    @classmethod
    def _default_size_and_weights(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        task, defaults = data.get("task"), dict[str, Any]()
        if not {"rows", "tokens"} & data.keys():
            defaults["rows"] = DEFAULT_ROWS
        if isinstance(task, str) and task in PROBES and PROBES[task].gold_position:
            defaults["weights"] = DEFAULT_WEIGHTS
        return {**defaults, **data}

    @property
    def probe(self) -> Probe | None:
        """The probe of `task`; None for other documents."""
        return PROBES[self.task] if self.task is not None else None

    @property
    def name(self) -> str:
        """Name in messages: the task, `base_text`, or the path of the data."""
        return self.data.path if self.data is not None else self.task or "base_text"

    @property
    def field(self) -> str:
        """Field of errors, such as `train.sources (kv_retrieval)`: each stage has a list, so an index would mislead."""
        return f"train.sources ({self.name})"

    @model_validator(mode="after")
    def _one_origin(self) -> Source:
        if [self.task, self.data, self.base_text].count(None) != 2:
            raise ValueError("set one of `task` (a probe), `data` (your own documents) and `base_text`")
        if (self.rows is None) == (self.tokens is None):
            raise ValueError(f"set either `rows` or `tokens`, the size of a step, such as `rows: {DEFAULT_ROWS}`")
        if self.probe is not None and "tokens" in self.probe.options and self.max_tokens is None:
            raise ValueError(f"{self.task} needs `max_tokens`: its length is configurable")
        if self.base_text is not None and self.max_tokens is None:
            raise ValueError("base_text needs `max_tokens`, the tokens of a text, such as `max_tokens: 256`")
        return self

    @model_validator(mode="after")
    def _weights_have_a_meaning(self) -> Source:
        if "weights" not in self.model_fields_set:
            keeps = self.probe is not None and (self.probe.knowledge or self.probe.scoring == "perplexity")
            usual = "base_kl: 1.0" if keeps or self.is_text else "answer: 1.0"
            raise ValueError(f"{self.name} needs `weights`, such as `weights: {{{usual}}}`")
        if not self.weights.at(0.5):
            raise ValueError("every weight is 0. Give an objective a weight, or remove the source")
        if self.weights.needs("answers") and self.probe is not None and self.probe.scoring == "perplexity":
            raise ValueError(f"{self.task} has no answers. Set {self._that_need('answers')} to 0")
        if self.weights.needs("gold_positions") and self.probe is not None and not self.probe.gold_position:
            names = self._that_need("gold_positions")
            raise ValueError(f"{self.task} has no gold position (`gold_position` of its class). Set {names} to 0")
        if self.is_text:
            if self.weights.needs("answers", "gold_positions"):
                raise ValueError(f"plain text has no answers. Set {self._that_need('answers', 'gold_positions')} to 0")
        elif self.data is not None and self.data.columns.answer_span is None and self.weights.needs("gold_positions"):
            names = self._that_need("gold_positions")
            hint = f"Set `data.columns.answer_span` to a column or to `{AUTO}`, or {names} to 0"
            raise ValueError(f"{names} needs gold positions. {hint}")
        return self

    @property
    def is_text(self) -> bool:
        """Whether its documents are plain text, without answers."""
        return self.base_text is not None or (self.data is not None and self.data.columns.text is not None)

    def _that_need(self, *needs: str) -> str:
        """Names of the objectives with a weight that need one of these, for messages."""
        return ", ".join(f"`weights.{name}`" for name in self.weights.at(0.5) if needs_of([name]) & set(needs))

    @model_validator(mode="after")
    def _options_apply(self) -> Source:
        options = self.probe.options if self.probe is not None else ()
        applies = {
            "max_tokens": self.probe is None or "tokens" in options,
            "pairs": self.probe is not None and self.probe.pairs is not None,
            "split": "half" in options,
            "train_eos": self.probe is not None and self.probe.newline_ends_answer,
        }
        for name in ("max_tokens", "pairs", "questions", "groups", "filler", "value_digits", "split", "train_eos"):
            if name in self.changed and not applies.get(name, name in options):
                hint = ", or set `data.end`" if name == "train_eos" and self.data is not None else ""
                raise ValueError(f"{self.name} does not use `{name}`: remove it{hint}")
        if self.probe is not None:
            self.probe.check_pairs(*self.pairs)
        check_value_digits(self.pairs[1], self.value_digits)
        return self
