"""Schema of the section `train`: data, objectives, trainable weights and optimizer. See docs/TRAINING.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, GetJsonSchemaHandler, TypeAdapter, field_validator, model_validator
from pydantic_core import CoreSchema

from surgery.probes.registry import PROBES, Probe
from surgery.recipe.base import Checkpoint
from surgery.recipe.objectives import OBJECTIVES, needs_of
from surgery.recipe.section import Pairs, Positive, Section, Tokens
from surgery.registry import NameOf
from surgery.types import HeadId

Weight = Annotated[float, Field(ge=0)]
Scheduled = Weight | tuple[Weight, Weight]  # constant, or [first, last] with a linear change over the stage
Beta = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Task = Annotated[str, NameOf(PROBES, keep=lambda probe: probe.trains)]
Trainable = Literal["all", "new_heads", "spliced_layers", "lora"]
_WEIGHTS_OF_0_1 = ("answer", "attention", "keep", "text", "distil", "reading", "mixing", "hidden")


class Weights(Section):
    """Weight of each objective on the documents of one source. [first, last] changes it linearly over the stage."""

    model_config = ConfigDict(extra="allow")
    path_in_recipe: ClassVar[str] = "train.sources.weights"
    renamed: ClassVar[dict[str, str]] = {
        "keep": "base_kl",
        "text": "lm",
        "reading": "attention_kl",
        "mixing": "attention_mse",
        "hidden": "hidden_mse",
    }
    __pydantic_extra__: dict[Annotated[str, NameOf(OBJECTIVES)], Scheduled] = Field(init=False)

    def at(self, progress: float) -> dict[str, float]:
        """Weights of the objectives that are used, in the order of their registration.

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
    def names_of_0_1(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """Every objective of version 0.1 was listed, with weight 0 by default."""
        return {**dict.fromkeys(_WEIGHTS_OF_0_1, 0.0), **super().names_of_0_1(data)}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        value = TypeAdapter(Scheduled).json_schema()
        properties = {
            name: {**value, "default": 0.0, "description": entry.description} for name, entry in OBJECTIVES.items()
        }
        return {**handler(schema), "properties": properties, "additionalProperties": False}


class Columns(Section):
    """Which fields of a row mean what. `text`, `messages`, or `prompt` and `answer`: whichever the rows have."""

    prompt: str = Field("prompt", description="What comes before the answer, spaces and newlines included.")
    answer: str = Field("answer", description="What is to be said; only this is trained by the objective `answer`.")
    answer_span: str | None = Field(
        None, description="[start, end) of the value in the prompt, in characters: what a new head is to look at."
    )
    text: str | None = Field(
        None, description="Plain text, for `text`, `keep` and `distil`; no prompt and answer then."
    )
    messages: str | None = Field(
        None, description="A chat; the last message is the answer. Needs a tokenizer with a chat template."
    )

    @model_validator(mode="after")
    def _one_form(self) -> Columns:
        if self.text is not None and self.messages is not None:
            raise ValueError("`text` or `messages`, not both")
        return self


class Data(Section):
    """Documents of the user's own."""

    path: str = Field(description="A JSONL or Parquet file, a folder of them, or a data set's id on the Hub.")
    name: str | None = Field(None, description="Configuration of a Hub data set.")
    split: str = Field("train", description="Of a Hub data set, or of a folder that has several.")
    revision: str | None = Field(None, description="Branch, tag or commit of a Hub data set.")
    columns: Columns = Columns()
    chat_template: bool = Field(False, description="Prompt and answer become a user's and an assistant's message.")
    end: bool = Field(True, description="The end-of-text token follows every answer and text, and is trained too.")
    streaming: bool = Field(False, description="Read while training, shuffled within a buffer, instead of before.")
    buffer: Positive = Field(1000, description="Rows of the shuffling buffer when streaming.")
    on_bad_row: Literal["error", "skip"] = Field("error", description="A row that cannot be used: stop, or count it.")
    holdout: float = Field(
        0.0, ge=0, lt=1, description="This share of the prompts is never trained on, and asked when evaluating."
    )


class Source(Section):
    """Documents that one generator, or one data set, contributes to every step. Their sizes weigh the mixture."""

    task: Task | None = Field(None, description="A generator of this toolkit.")
    data: Data | None = Field(None, description="Or documents of your own.")
    rows: Positive | None = Field(None, description="Documents a step, over all processes.")
    tokens: Positive | None = Field(None, description="Or tokens a step: documents until they are that many.")
    max_tokens: Positive | None = Field(
        None,
        description="data: the longest document. Longer texts are cut into several; a longer prompt is a bad row. "
        "needle_*: as long as a document may be, up to the end of its last answer.",
    )
    pairs: tuple[Pairs, Pairs] = Field(
        (2, 16),
        description="Lines of kv_retrieval, phonebook, json_kv, mqar and multi_hop, hidden numbers of needle_multi_*, "
        "pieces of copying: a step's number is drawn from this range.",
    )
    questions: Positive = Field(1, description="kv_retrieval, phonebook, json_kv, mqar: questions a document, at most.")
    groups: tuple[Positive, ...] | None = Field(
        None, description="json_kv: digits of each group of a key and of a value; a UUID's if not said. [4] is small."
    )
    train_eos: bool = Field(
        False, description="Also train on the newline after the answers of a task, so that generation stops there."
    )
    split: Literal[0, 1] | None = Field(None, description="closed_book, statement, sentence: use this half only.")
    weights: Weights
    path_in_recipe: ClassVar[str] = "train.sources"
    renamed: ClassVar[dict[str, str]] = {"end": "train_eos", "half": "split"}

    @property
    def probe(self) -> Probe | None:
        """The probe of `task`; None for the user's own data."""
        return PROBES[self.task] if self.task is not None else None

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.task if self.task is not None else self.data.path if self.data is not None else ""

    @field_validator("pairs")
    @classmethod
    def _ordered(cls, value: tuple[int, int]) -> tuple[int, int]:
        if value[0] > value[1]:
            raise ValueError("the range is [low, high], with low <= high")
        return value

    @model_validator(mode="after")
    def _one_origin(self) -> Source:
        if (self.task is None) == (self.data is None):
            raise ValueError("give `task`, a generator, or `data`, documents of your own: one of them")
        if (self.rows is None) == (self.tokens is None):
            raise ValueError("give `rows` or `tokens` a step: one of them")
        if self.probe is not None and ("tokens" in self.probe.options) != (self.max_tokens is not None):
            if self.max_tokens is None:
                raise ValueError(f"{self.task} needs `max_tokens`: its length is configurable")
            raise ValueError(f"{self.task} has no `max_tokens`: `pairs` sets the length of generated documents")
        return self

    @model_validator(mode="after")
    def _weights_have_a_meaning(self) -> Source:
        if not self.weights.at(0.5):
            raise ValueError("every weight is 0. Give an objective a weight, or remove the source")
        if self.weights.needs("answers") and self.probe is not None and self.probe.scoring == "perplexity":
            raise ValueError(f"{self.task} has no answers. Set {self._that_need('answers')} to 0")
        if self.weights.needs("gold_positions") and self.probe is not None and not self.probe.gold_position:
            raise ValueError(f"{self.task} has no gold position. Set {self._that_need('gold_positions')} to 0")
        if self.data is not None and self.data.columns.text is not None:
            if self.weights.needs("answers", "gold_positions"):
                raise ValueError(f"plain text has no answers. Set {self._that_need('answers', 'gold_positions')} to 0")
        elif self.data is not None and self.data.columns.answer_span is None and self.weights.needs("gold_positions"):
            names = self._that_need("gold_positions")
            raise ValueError(f"{names} needs gold positions. Set `data.columns.answer_span`, or {names} to 0")
        return self

    def _that_need(self, *needs: str) -> str:
        """Names of the objectives with a weight that need one of these, for messages."""
        return ", ".join(f"`weights.{name}`" for name in self.weights.at(0.5) if needs_of([name]) & set(needs))

    @model_validator(mode="after")
    def _end_has_a_meaning(self) -> Source:
        if self.train_eos and not (self.probe and self.probe.newline_ends_answer):
            hint = "Set `data.end` instead" if self.data is not None else "Remove it"
            raise ValueError(f"`train_eos` needs a task with a newline after its answers: {self.name} is none. {hint}")
        return self

    @model_validator(mode="after")
    def _sizes_have_a_meaning(self) -> Source:
        options = self.probe.options if self.probe is not None else ()
        if self.probe is not None:
            self.probe.check_pairs(*self.pairs)
        if self.questions > 1 and "questions" not in options:
            raise ValueError(f"{self.name} takes one question a document. Remove `questions`.")
        if self.groups is not None and "groups" not in options:
            raise ValueError(f"{self.name} has no groups of digits. Remove `groups`.")
        if self.groups is not None and (sum(self.groups) < 4 or self.groups[0] < 3):
            raise ValueError("`groups` are 4 digits or more, 3 or more of them in the first group")
        return self

    @model_validator(mode="after")
    def _half_has_a_meaning(self) -> Source:
        if self.split is not None and not (self.probe and "half" in self.probe.options):
            raise ValueError(f"{self.name} has no halves. Remove `split`")
        return self


class Optimizer(Section):
    """AdamW, with one learning rate for the new heads, one for adapters, and one for the rest."""

    lr: Rate = Field(2e-3, description="Learning rate of the weights that the base had.")
    new_heads_lr: Rate = Field(6e-3, description="Learning rate of the spliced heads.")
    lora_lr: Rate | None = Field(None, description="Learning rate of LoRA's adapters; the new heads' if not said.")
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    weight_decay: Weight = 0.0
    warmup: int = Field(20, ge=0, le=10**9, description="Steps of linear warm-up.")
    schedule: Literal["cosine", "wsd", "constant"] = Field(
        "cosine", description="After the warm-up: a cosine to `floor`; constant, then a line to it (WSD); or constant."
    )
    decay: Share = Field(0.1, description="wsd: the share of the steps, at the end, that the line takes.")
    floor: Share = Field(0.0, description="Where the schedule ends, as a share of the learning rate.")
    max_grad_norm: float = Field(1.0, gt=0)


class Lora(Section):
    """Low-rank adapters (PEFT) on what is not new. They are merged at the end of the stage, and saved beside it."""

    rank: Positive = 8
    alpha: Positive = 16
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: tuple[str, ...] = Field(
        ("in_proj", "out_proj"), min_length=1, description="Names of the linear layers that get one."
    )


class Distil(Section):
    """How `base_kl` and `distil` compare two distributions of the next token."""

    divergence: Literal["forward", "reverse", "jensen_shannon"] = Field(
        "forward", description="KL(teacher || student), KL(student || teacher), or the mean of both to their mean."
    )
    temperature: float = Field(1.0, gt=0, description="Both logits are divided by it, the loss times its square.")
    top_k: Positive | None = Field(
        None, description="Compare the teacher's k likeliest tokens and the rest as one; every token if not said."
    )
    cache: bool = Field(
        False, description="Write the teacher's top_k logits to disk when they are first needed, and read them after."
    )

    @model_validator(mode="after")
    def _cache_is_small(self) -> Distil:
        if self.cache and self.top_k is None:
            raise ValueError("`cache` needs `top_k`: whole rows of logits would fill the disk")
        return self


class Align(Section):
    """Which heads and layers of the teacher correspond to those of the hybrid."""

    heads: dict[str, str] = Field(
        {}, description="The teacher's head for a spliced head, such as {L17H3: L17H24}; the same name if not said."
    )
    offsets: dict[str, int] = Field(
        {}, description="Tokens from where the teacher's head reads to where the spliced one is to: {L17H3: -1}."
    )
    layers: dict[int, int] = Field(
        {}, description="The teacher's layer for each layer to compare; all of them, in proportion, if not said."
    )

    @field_validator("heads", "offsets")
    @classmethod
    def _heads(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in (*value, *(other for other in value.values() if isinstance(other, str))):
            HeadId.parse(name)
        return value


class TrainStage(Section):
    """A stretch of training with its data, objectives, what trains, learning rates and length."""

    name: str = Field("finetune", pattern=r"^[a-z0-9_-]+$")
    steps: Positive | None = Field(None, description="Steps; 300 if `tokens` is not said either.")
    tokens: Tokens | None = Field(None, description="Or tokens in all; every source then says its `tokens` a step.")
    trainable: Trainable = Field(
        "all", description="Weights to train. `lora`: the new heads in full, and adapters on the rest."
    )
    sources: tuple[Source, ...] = ()
    optimizer: Optimizer = Optimizer()
    lora: Lora = Lora()
    distil: Distil = Distil()
    align: Align = Align()
    path_in_recipe: ClassVar[str] = "train"
    renamed: ClassVar[dict[str, str]] = {"trains": "trainable"}

    @model_validator(mode="after")
    def _a_length(self) -> TrainStage:
        if self.steps is not None and self.tokens is not None:
            raise ValueError("give `steps` or `tokens`, not both")
        if self.tokens is not None and any(source.tokens is None for source in self.sources):
            raise ValueError("with `tokens` in all, every source says `tokens` a step, not rows")
        return self

    @property
    def num_steps(self) -> int:
        """How many steps it takes."""
        if self.tokens is None:
            return self.steps or 300
        return -(-self.tokens // sum(source.tokens or 0 for source in self.sources))

    @property
    def sequence(self) -> tuple[TrainStage, ...]:
        """Stages, in order."""
        return (self,)

    @property
    def objectives(self) -> tuple[str, ...]:
        """Objectives that have a weight in a source of any stage."""
        used = {name for stage in self.sequence for source in stage.sources for name in source.weights.at(0.5)}
        return tuple(name for name in OBJECTIVES if name in used)

    def uses(self, *names: str) -> bool:
        """Whether one of these objectives has a weight."""
        return bool(set(self.objectives) & set(names))

    @property
    def needs(self) -> frozenset[str]:
        """What the objectives need, such as `base.logits` and `teacher.attention`."""
        return frozenset(needs_of(self.objectives))

    @property
    def needs_teacher(self) -> bool:
        """Whether an objective compares with a teacher."""
        return any(need.startswith("teacher.") for need in self.needs)


class Train(TrainStage):
    """Brief training: one stage, or several of them in `stages`. A step's sources add up their gradients."""

    stages: tuple[TrainStage, ...] = Field((), description="Such as align, distil, finetune, in place of one stage.")
    teacher: Checkpoint | None = Field(
        None, description="A model with the same tokenizer, for the objectives that compare with a teacher."
    )
    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="bf16: matrix products in bf16; what trains stays in fp32, with A_log, dt_bias and D."
    )
    micro_batch: Positive | None = Field(
        None, description="Documents of a source at a time, on one process; all if not said. The gradient is the same."
    )
    packing: bool = Field(
        False, description="Documents share rows, none sees another, where kernels do that. The gradient is the same."
    )
    gradient_checkpointing: bool = Field(False, description="Recompute activations: less memory, more time.")
    compile: bool = Field(False, description="torch.compile the model.")
    save_every: Positive = Field(50, description="Steps between checkpoints to resume from.")
    check_every: Positive | None = Field(
        None, description="Steps between looks at held-out KV accuracy; never if not said."
    )
    trackers: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = Field(
        (), description="Where losses go too, through Accelerate."
    )
    control: bool = Field(True, description="Also train the control: the base without a splice, for the same steps.")
    renamed: ClassVar[dict[str, str]] = {**TrainStage.renamed, "no_splice": "control"}

    @model_validator(mode="after")
    def _one_or_several(self) -> Train:
        if self.stages:
            fields = TrainStage.model_fields.items()
            given = sorted(name for name, field in fields if getattr(self, name) != field.default)
            if given:
                raise ValueError(f"with `stages`, each says its own {', '.join(given)}")
        names = [stage.name for stage in self.sequence]
        if len(set(names)) < len(names):
            raise ValueError("two stages have the same name")
        for stage in self.sequence:
            if not stage.sources:
                raise ValueError(f"the stage {stage.name} has no `sources`")
            if stage.needs_teacher and self.teacher is None:
                users = [name for name in stage.objectives if OBJECTIVES[name].needs_teacher]
                raise ValueError(f"`weights.{users[0]}` needs a teacher. Set `teacher`")
        if self.teacher is not None and not self.needs_teacher:
            usable = ", ".join(name for name, objective in OBJECTIVES.items() if objective.needs_teacher)
            raise ValueError(f"no objective uses `teacher`. Give one of {usable} a weight, or remove it")
        return self

    @model_validator(mode="after")
    def _held_out_everywhere(self) -> Train:
        shares: dict[str, float] = {}
        for data in self.own_data:
            if shares.setdefault(data.path, data.holdout) != data.holdout:
                raise ValueError(f"{data.path} is listed twice with another `holdout`: what is held out is trained on")
        return self

    @property
    def own_data(self) -> tuple[Data, ...]:
        """The user's own data of all stages, as often as it is listed."""
        return tuple(source.data for stage in self.sequence for source in stage.sources if source.data is not None)

    @property
    def sequence(self) -> tuple[TrainStage, ...]:
        """Stages, in order."""
        return self.stages or (self,)

    @property
    def num_all_steps(self) -> int:
        """Of all stages."""
        return sum(stage.num_steps for stage in self.sequence)

    @property
    def has_control(self) -> bool:
        """Whether a control is trained. If only new heads train, the base itself is the control."""
        return self.control and any(stage.trainable != "new_heads" for stage in self.sequence)
