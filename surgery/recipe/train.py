"""Schema of the section `train`: stages, trainable weights, objectives and optimizer. See docs/TRAINING.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from surgery.recipe.base import Checkpoint
from surgery.recipe.objectives import OBJECTIVES, needs_of
from surgery.recipe.optimizer import Optimizer
from surgery.recipe.section import OneOrMore, Positive, Section, Tokens
from surgery.recipe.sources import DEFAULT_ROWS, DEFAULT_WEIGHTS, Data, Source, Weights
from surgery.recipe.stage_parts import Align, Distil, Lora, Plateau

STAGE_NAME = r"^[a-z0-9_-]{1,100}$"
Trainable = Literal["all", "reads", "new_heads", "spliced_layers", "lora"]
Precision = Literal["fp32", "bf16"]
MAX_QUESTIONS = 48  # of a document of the stage `read`


# Sources of a recipe that lists none.
DEFAULT_SOURCES: tuple[Mapping[str, Any], ...] = (
    {
        "task": "kv_retrieval",
        "pairs": (4, 32),
        "questions": 4,
        "rows": DEFAULT_ROWS,
        "train_eos": True,
        "weights": DEFAULT_WEIGHTS,
    },
    {"task": "sentence", "split": 0, "rows": DEFAULT_ROWS, "weights": {"base_kl": 1.0}},
)


class TrainStage(Section):
    """One stage of training: its length, data, objectives, trainable weights and optimizer."""

    name: str = Field("finetune", pattern=STAGE_NAME)
    steps: Positive | None = Field(None, examples=[300])
    """Number of steps; with `plateau`, the largest. 300 if neither this nor `tokens` is set."""
    tokens: Tokens | None = None
    """Total number of tokens, instead of `steps`. Every source must then set `tokens`."""
    plateau: Plateau | None = None
    """End before the last step, at a plateau of the loss. With `wsd` the rate then decays, for the share `decay` of all
    trained steps; with `constant` training ends. By default all steps are trained."""
    trainable: Trainable = "all"
    """Weights to train: all, the spliced heads, their queries and keys alone, with the Gather layers of pairs (`reads`,
    with objectives on attention: each layer for itself, and no layer above the last head runs), the layers with spliced
    heads, or (`lora`) the spliced heads and adapters on the rest."""
    sources: tuple[Source, ...] = ()
    """Documents of each step. By default kv_retrieval with `answer` and `attention`, and sentences with `base_kl`; with
    `stages`, each stage sets its own."""
    optimizer: Optimizer = Optimizer()
    lora: Lora = Lora()
    distil: Distil = Distil()
    align: Align = Align()

    @model_validator(mode="after")
    def _parts_fit(self) -> TrainStage:
        if self.steps is not None and self.tokens is not None:
            raise ValueError("set `steps` or `tokens`, not both")
        if self.tokens is not None and any(source.tokens is None for source in self.sources):
            raise ValueError("`tokens` of a stage needs `tokens` in every source. Set it in place of `rows`")
        if self.trainable == "reads":
            if self.optimizer.weight_decay:
                raise ValueError("`weight_decay` with `trainable: reads` would change the values too. Set it to 0")
            for name in self.objectives:
                objective = OBJECTIVES[name]
                if not objective.needs_splice or objective.reads_logits != "none":
                    raise ValueError(
                        f"`trainable: reads` does not support the objective {name}: only queries and keys train. Use "
                        "attention, or set new_heads"
                    )
        if self.lora.quantization is not None and self.trainable != "lora":
            raise ValueError(
                f"`lora.quantization: {self.lora.quantization}` needs `trainable: lora`, since weights of 4 bits are "
                "frozen. Set it, or remove `quantization`"
            )
        return self

    @model_validator(mode="after")
    def _a_plateau_that_can_be_found(self) -> TrainStage:
        if self.plateau is None:
            return self
        if self.optimizer.schedule == "cosine":
            hint = "Set `optimizer.schedule` to wsd or constant"
            raise ValueError(f"`plateau` cannot end a cosine, whose rates follow from the number of steps. {hint}")
        if self.optimizer.decay_share == 1:
            raise ValueError(
                "`plateau` needs steps at a constant rate, and `optimizer.decay: 1` leaves none. Set it below 1"
            )
        if any(source.weights.at(0.0) != source.weights.at(1.0) for source in self.sources):
            hint = "Set one number for each weight"
            raise ValueError(f"`plateau` needs constant weights: a change of weights needs the number of steps. {hint}")
        if self.plateau.monitor not in ("loss", *self.objectives):
            known = ", ".join(("loss", *self.objectives))
            raise ValueError(
                f"`plateau.monitor` is {self.plateau.monitor}, which is not trained on. Use one of {known}"
            )
        if self.sources:  # without them, `tokens` gives no number of steps
            self._check_steps(self.plateau)
        return self

    def _check_steps(self, plateau: Plateau) -> None:
        """Raise ValueError if the stage has too few steps to end at a plateau."""
        steps, warmup = self.num_steps, self.optimizer.warmup
        earliest = plateau.earliest(steps, warmup)
        if self.end_after(earliest) < steps:
            return
        enough = steps
        for _ in range(100):  # without `min_steps`, more steps delay the earliest plateau
            enough = max(enough, self.end_after(plateau.earliest(enough, warmup)) + 1)
        hint = "Lower `window`, `patience` or `min_steps` of it, `optimizer.warmup` or `optimizer.decay`"
        if self.end_after(plateau.earliest(enough, warmup)) < enough <= 10**9:
            key, least = "steps", enough
            if self.tokens is not None:
                key, least = "tokens", (enough - 1) * sum(source.tokens or 0 for source in self.sources) + 1
            hint += f", or set `{key}` to {least}"
        raise ValueError(
            f"`plateau` cannot end {steps} steps early: the earliest plateau is at step {earliest}, and the stage then "
            f"ends at step {self.end_after(earliest)}. {hint}"
        )

    def end_after(self, step: int) -> int:
        """Last step of a stage with a plateau after `step`. With `wsd` the decay takes its share of all steps."""
        return round(step / (1 - self.optimizer.decay_share))

    @property
    def num_steps(self) -> int:
        """Number of steps of this stage; the largest number if it can end at a plateau."""
        if self.tokens is None:
            return self.steps or 300
        return -(-self.tokens // sum(source.tokens or 0 for source in self.sources))

    def at_size(self, parameters: int) -> Self:
        """Return the section with learning rates for a base with this number of weights, where none are set."""
        update: dict[str, Any] = {"optimizer": self.optimizer.at_size(parameters)}
        if self.sequence != (self,):
            update = {"stages": tuple(stage.at_size(parameters) for stage in self.sequence)}
        return self.model_copy(update=update)

    @property
    def trains_control(self) -> bool:
        """Whether the control trains in this stage too: it has no new heads."""
        return self.trainable not in ("reads", "new_heads")

    @property
    def sequence(self) -> tuple[TrainStage, ...]:
        """Stages, in order."""
        return (self,)

    @property
    def objectives(self) -> tuple[str, ...]:
        """Objectives that have a weight in a source of any stage."""
        used = {name for stage in self.sequence for source in stage.sources for name in source.weights.at(0.5)}
        return tuple(name for name in OBJECTIVES if name in used)

    @property
    def needs(self) -> frozenset[str]:
        """What the objectives need, such as `base.logits` and `teacher.attention`."""
        return frozenset(needs_of(self.objectives))

    @property
    def needs_teacher(self) -> bool:
        """Whether an objective compares with a teacher."""
        return any(need.startswith("teacher.") for need in self.needs)


def _reading(source: Source) -> Source:
    """The source of a stage that trains attention alone: a read costs little beside its context."""
    update: dict[str, Any] = {"weights": Weights(attention=1.0)}
    if source.probe is not None and "questions" in source.probe.options:
        update["questions"] = max(source.questions, min(source.pairs[0], MAX_QUESTIONS))
    return source.model_copy(update=update)


class Train(TrainStage):
    """Brief training in one stage, or in several `stages`. The gradients of a step's sources are summed."""

    stages: tuple[TrainStage, ...] = Field((), examples=[[{"name": "finetune", "sources": [{"task": "kv_retrieval"}]}]])
    """Several stages instead of one, such as align, distil, finetune."""
    read_steps: Positive | None = Field(
        None,
        description="Steps of a stage `read` before: `trainable: reads` on the attention of the same sources. A task "
        f"asks as many questions as the lower end of its `pairs`, up to {MAX_QUESTIONS}. By default there is none.",
        examples=[300],
    )
    teacher: Checkpoint | None = None
    """Model with the same tokenizer, for the objectives that compare with a teacher."""
    precision: Precision = "fp32"
    """bf16: compute matrix products in bf16, as is always done for a base in half precision. Trained weights stay in
    fp32, and so do A_log, dt_bias and D."""
    micro_batch: Positive | None = None
    """Documents per forward pass and process. By default all whose objectives need the same models. Does not change the
    gradient."""
    packing: bool | None = None
    """Put several documents into one row, without attention or state between them, where the model supports it. By
    default on a GPU. Does not change the gradient."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    compile: bool = False
    """Compile the model with torch.compile."""
    workers: int | None = Field(None, ge=0, le=256, strict=True)
    """Processes that prepare the documents of the next steps; 0 prepares each when it is needed. By default none on a
    CPU, and on a GPU the free cores less one, at most 8. Does not change the weights."""
    save_every: Positive = 50
    """Steps between checkpoints to resume from. One process also saves after five minutes."""
    check_every: Positive | None = None
    """Steps between measurements of held-out KV accuracy. By default it is not measured."""
    trackers: OneOrMore[Literal["tensorboard", "trackio", "wandb"]] = Field((), examples=[["tensorboard"]])
    """Experiment trackers that also receive the losses, through Accelerate."""
    control: bool = True
    """Also train the control: the base without a splice, for the same steps."""

    @model_validator(mode="before")
    @classmethod
    def _default_sources(cls, data: Any) -> Any:
        """Sources if neither `sources` nor `stages` is set."""
        if isinstance(data, Mapping) and not {"sources", "stages"} & data.keys() and "tokens" not in data:
            return {**data, "sources": DEFAULT_SOURCES}
        return data

    @model_validator(mode="after")
    def _one_or_several(self) -> Train:
        if self.stages:
            outside = sorted(self.changed.keys() & TrainStage.model_fields.keys())
            if outside:
                raise ValueError(f"with `stages`, set {', '.join(outside)} in each stage instead of in `train`")
            if self.read_steps is not None:
                raise ValueError("with `stages`, add a stage with `trainable: reads` in place of `read_steps`")
        elif self.read_steps is not None and not any(source.weights.uses("attention") for source in self.sources):
            raise ValueError("`read_steps` needs a source with `weights.attention`. Set it, or remove `read_steps`")
        sizes = {(s.base_text, s.max_tokens) for stage in self.sequence for s in stage.sources if s.base_text}
        if len(sizes) > 1:
            raise ValueError("all sources with `base_text` read the same texts. Set the same number and `max_tokens`")
        names = [stage.name for stage in self.sequence]
        if len(set(names)) < len(names):
            raise ValueError(f"two stages have the same name: {', '.join(names)}. Rename one")
        for stage in self.sequence:
            if self.compile and stage.trainable == "reads":
                raise ValueError("`compile` does not support `trainable: reads`, whose passes end early. Remove it")
            if not stage.sources:
                raise ValueError(f"the stage {stage.name} has no `sources`. Add one")
            if stage.needs_teacher and self.teacher is None:
                users = [name for name in stage.objectives if OBJECTIVES[name].needs_teacher]
                raise ValueError(f"`weights.{users[0]}` needs a teacher. Set `teacher`")
        if self.teacher is not None and not self.needs_teacher:
            usable = ", ".join(name for name, objective in OBJECTIVES.items() if objective.needs_teacher)
            raise ValueError(f"no objective uses `teacher`. Give one of {usable} a weight, or remove it")
        return self

    @model_validator(mode="after")
    def _held_out_everywhere(self) -> Train:
        for data, other in combinations(self.own_data, 2):
            if not data.may_share_rows(other) or data.holds_out_by == other.holds_out_by:
                continue
            if data.holdout != other.holdout:
                raise ValueError(
                    f"{other.path} is listed twice with different `holdout`, so held-out prompts would be trained on. "
                    "Set the same `holdout`"
                )
            if data.holdout:
                raise ValueError(
                    f"{other.path} is listed twice with a `holdout` and different columns. These decide which rows are "
                    "held out, so held-out rows would be trained on. Set the same columns, or put the rows to hold out "
                    "into a file of their own"
                )
        return self

    @property
    def own_data(self) -> tuple[Data, ...]:
        """The user's own data of all stages, once for every source that lists it."""
        return tuple(source.data for stage in self.sequence for source in stage.sources if source.data is not None)

    @property
    def sequence(self) -> tuple[TrainStage, ...]:
        """Stages, in order."""
        if self.stages or self.read_steps is None:
            return self.stages or (self,)
        read = TrainStage(
            name="read",
            steps=self.read_steps,
            trainable="reads",
            sources=tuple(_reading(source) for source in self.sources if source.weights.uses("attention")),
            # Nothing else changes, so the rate is higher. Decay would change the values, which lie in the same matrix.
            optimizer=self.optimizer.model_copy(
                update={"new_heads_lr_factor": 1.0, "weight_decay": 0.0, "lora_lr": None}
            ),
        )
        return read, self.model_copy(update={"read_steps": None})

    @property
    def base_texts(self) -> tuple[int, int] | None:
        """Number of texts that the base writes, and the tokens of each; None if no source has `base_text`."""
        sources = (source for stage in self.sequence for source in stage.sources)
        return next(((s.base_text, s.max_tokens) for s in sources if s.base_text and s.max_tokens), None)

    @property
    def num_all_steps(self) -> int:
        """Number of steps of all stages; the largest number if a stage can end at a plateau."""
        return sum(stage.num_steps for stage in self.sequence)

    @property
    def has_plateau(self) -> bool:
        """Whether a stage can end at a plateau."""
        return any(stage.plateau is not None for stage in self.sequence)

    def with_steps(self, steps: Sequence[int]) -> Train:
        """Return the section with a fixed number of steps for each stage, and without plateaus."""
        fixed = [
            stage.model_copy(update={"steps": number, "tokens": None, "plateau": None})
            for stage, number in zip(self.sequence, steps, strict=True)
        ]
        if len(fixed) > 1:
            return self.model_copy(update={"stages": tuple(fixed)})
        update = {"steps": steps[0], "tokens": None, "plateau": None}
        return self.model_copy(update=update)

    @property
    def trains_spliced_layers(self) -> bool:
        """Whether a stage trains the layers with spliced heads, so that the control depends on the plan."""
        return any(stage.trainable == "spliced_layers" for stage in self.sequence)

    @property
    def has_control(self) -> bool:
        """Whether a control is trained. If only new heads train, the base itself is the control."""
        return self.control and any(stage.trains_control for stage in self.sequence)
