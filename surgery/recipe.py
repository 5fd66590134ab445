"""The recipe: one YAML file that says everything a run does. Owns: schema, defaults, loading.

Must never know: torch, transformers, run folders. Unknown keys are forbidden, duplicate keys refused, and every
default lives here. A stage depends on the sections that `stages.STAGES` names.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from surgery.changes import Change, Sweep
from surgery.errors import RecipeError
from surgery.files.secret_scan import refuse_tokens
from surgery.measures import NEEDS, TEXTS, TODAY, Efficiency, LmEval, Locate, Probe, Select
from surgery.sections import Pairs, Positive, Section
from surgery.training import Checkpoint, Optimizer, Source, Task, Train, Weights
from surgery.types import HeadId, Init, Mode, Unit
from surgery.yamlfile import read_mapping

Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]


class Base(Section):
    """The pretrained model that is operated on."""

    model: str = Field(description="Folder of a checkpoint, or its id on the Hub.")
    revision: str | None = Field(None, description="Branch, tag or commit of a Hub id.")
    tokenizer: str | None = Field(None, description="Where the tokenizer is, if not with the model.")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = Field("float32", description="Of the weights in memory.")
    trust_remote_code: bool = Field(False, description="Run code that the checkpoint brings along.")
    channels_per_head: Positive | None = Field(
        None, description="Mamba-1 has channels and no heads: how many of them are taken as one. 64 if not said."
    )


def as_base(given: Checkpoint) -> Base:
    """The same checkpoint, as what loads one wants it."""
    return Base(model=given.model, revision=given.revision, dtype=given.dtype)


class Teacher(Checkpoint):
    """A Transformer whose attention is transplanted. It has to be as wide as the base."""

    donors: dict[str, str] = Field(
        {},
        description="Its head for a head of the base, such as {L17H3: L17H24}; the one of the same name if not said.",
    )

    @field_validator("donors")
    @classmethod
    def _heads(cls, value: dict[str, str]) -> dict[str, str]:
        for name in (*value, *value.values()):
            HeadId.parse(name)
        return value


class Splice(Section):
    """What is put there."""

    select: Select = Field(
        "sharpen",
        description="Which heads: by what measure, as listed in `heads`, or for control at random or evenly spaced.",
    )
    num_heads: Positive = Field(1, description="How many heads to splice.")
    heads: tuple[str, ...] = Field((), description="With `select: list`: the heads, such as L1H2.")
    mode: Mode = Field("add", description="`add`: a branch beside the SSM, zero at first. `replace`: the head goes.")
    init: Init = Field(
        "ssm",
        description="`ssm`: copies of the head's C, B, x and gate. `teacher`: a Transformer's. `random`: the control.",
    )
    unit: Unit = Field(
        "head",
        description="`layer` puts the teacher's whole attention in the place of each chosen head's mixer (Llamba).",
    )
    with_block: bool = Field(
        False, description="With `unit: layer`: the teacher's norms and MLP of that layer as well."
    )
    teacher: Teacher | None = Field(None, description="With `init: teacher`: whose attention.")
    random_width: Positive = Field(32, description="Query and key width of a randomly initialised head.")

    @model_validator(mode="after")
    def _list_and_select(self) -> Splice:
        for name in self.heads:
            HeadId.parse(name)
        if len(set(self.heads)) < len(self.heads):
            raise ValueError("the same head is listed twice")
        if (self.select == "list") != bool(self.heads):
            raise ValueError("`heads` goes with `select: list`, and only with it")
        if (self.init == "teacher") != (self.teacher is not None):
            raise ValueError("`teacher` goes with `init: teacher`, and only with it")
        if self.unit == "layer" and (self.init, self.mode) != ("teacher", "replace"):
            raise ValueError("`unit: layer` needs `init: teacher` and `mode: replace`")
        if self.with_block and self.unit != "layer":
            raise ValueError("`with_block` goes with `unit: layer`")
        return self


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


class Export(Section):
    """The checkpoint folder that loads in stock transformers."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    license: str | None = Field(None, description="Licence for the card; that of the base's own card if not said.")
    max_shard_size: str = Field(
        "50GB", pattern=r"^[1-9][0-9]{0,5}(KB|MB|GB|TB)$", description="Weights above it lie in several files."
    )


class Hardware(Section):
    """What it is to run on. Nothing depends on it but what `--dry-run` says of the fit."""

    gpu: str | None = Field(None, description="Name of the GPU, such as A100-80GB.")
    count: Positive = Field(1, description="How many; each holds the whole model and its share of a step's documents.")
    memory_gib: float | None = Field(None, gt=0, le=10**6, description="Memory of one, in GiB.")


class Recipe(Section):
    """One operation, from a pretrained model to an exported hybrid, or from a hybrid to one that is trained further."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$", description="Names the run folder, runs/NAME.")
    seed: Seed = 0
    base: Base
    locate: Locate = Locate()
    splice: Splice | None = Field(
        Splice(), description="What is spliced where; null where the base is a hybrid already, to be trained further."
    )
    control: Checkpoint | None = Field(
        None,
        description="With `splice: null`: a model without a splice that is trained alike, such as the hybrid's own "
        "base. No control is trained if not said.",
    )
    train: Train
    evaluate: Evaluate = Evaluate()
    export: Export = Export()
    hardware: Hardware = Hardware()

    @model_validator(mode="after")
    def _choice_is_measured(self) -> Recipe:
        needed = NEEDS.get(self.splice.select) if self.splice is not None else None
        if self.splice is not None and needed is not None and needed not in self.locate.methods:
            raise ValueError(f"splice.select: {self.splice.select} needs {needed} among locate.methods")
        return self

    @model_validator(mode="after")
    def _control_is_the_base(self) -> Recipe:
        if self.control is not None and self.splice is not None:
            raise ValueError("`control` goes with `splice: null`; with a splice the base itself is the control")
        return self

    @property
    def has_control(self) -> bool:
        """Whether a control is trained: the base, or with `splice: null` the model that is named."""
        return self.train.has_control and (self.splice is not None or self.control is not None)

    @property
    def teacher(self) -> Teacher | None:
        """Whose attention is transplanted, if any."""
        return self.splice.teacher if self.splice is not None else None


class AnalysisRecipe(Section):
    """What a model can do with parts of it gone: retrieval and knowledge side by side. Nothing is trained."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$", description="Names the run folder, runs/NAME.")
    seed: Seed = 0
    base: Base
    changes: tuple[Change, ...] = ()
    sweeps: tuple[Sweep, ...] = ()
    teacher: Teacher | None = Field(None, description="Whose layers `swap` and `swap_one` put in.")
    margin: float = Field(
        0.05, ge=0, lt=1, description="KV-retrieval accuracy that the minimal model may lose, even significantly."
    )
    evaluate: Evaluate = Evaluate()
    hardware: Hardware = Hardware()

    @model_validator(mode="after")
    def _names_differ(self) -> AnalysisRecipe:
        names, kinds = [change.name for change in self.changes], [sweep.kind for sweep in self.sweeps]
        if not names + kinds:
            raise ValueError("nothing is changed: give `changes`, `sweeps` or both")
        if len({"base", *names}) <= len(names):
            raise ValueError("every change needs a name of its own, other than `base`")
        if len(set(kinds)) < len(kinds):
            raise ValueError("the same sweep is listed twice")
        return self

    @model_validator(mode="after")
    def _asks_what_is_compared(self) -> AnalysisRecipe:
        if self.evaluate.tasks != TODAY or self.evaluate.generate or self.evaluate.lm_eval is not None:
            raise ValueError("an analysis asks its own tasks: leave `evaluate.tasks`, `generate` and `lm_eval` out")
        return self

    @model_validator(mode="after")
    def _parts_are_there(self) -> AnalysisRecipe:
        kinds = [sweep.kind for sweep in self.sweeps]
        counts = [change.layers for change in self.changes] + [sweep.layers for sweep in self.sweeps]
        if "prune" not in kinds and "minimal" in counts:
            raise ValueError("`layers: minimal` needs the sweep `prune`, which finds it")
        swaps = "swap_one" in kinds or any(change.swap for change in self.changes)
        if swaps != (self.teacher is not None):
            raise ValueError("`teacher` goes with `swap` or `swap_one`, and only with them")
        if self.teacher is not None and self.teacher.donors:
            raise ValueError("`teacher.donors` are for splicing heads; name the layer in `swap.teacher_layer`")
        return self


class TinyMamba2(Section):
    """Shape of a small Mamba-2 that is pretrained here."""

    kind: Literal["mamba2"] = "mamba2"
    hidden_size: Positive = 128
    num_hidden_layers: Positive = 4
    head_dim: Positive = 32
    state_size: Positive = 16
    n_groups: Positive = 1
    chunk_size: Positive = 32
    time_step: tuple[float, float] = Field((0.05, 0.5), description="Initial dt, log-uniform between these.")
    decay: tuple[float, float] = Field((0.02, 1.0), description="Initial -A of the first and last head, log-spaced.")
    vocab_size: int = Field(1024, ge=300, le=2000, description="Entries of the tokenizer, at most.")

    @model_validator(mode="after")
    def _heads_fit(self) -> TinyMamba2:
        if 2 * self.hidden_size % self.head_dim or (2 * self.hidden_size // self.head_dim) % self.n_groups:
            raise ValueError("head_dim must divide 2 * hidden_size, and n_groups the number of heads that gives")
        return self

    @field_validator("time_step", "decay")
    @classmethod
    def _positive_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 < value[0] <= value[1]:
            raise ValueError("the range must satisfy 0 < low <= high")
        return value


class TinyTransformer(Section):
    """Shape of a small Transformer (Llama's class) that is pretrained here, to be a teacher."""

    kind: Literal["llama"]
    hidden_size: Positive = 128
    num_hidden_layers: Positive = 4
    num_attention_heads: Positive = 4
    num_key_value_heads: Positive = 4
    intermediate_size: Positive = 256
    initializer_range: float = Field(0.02, gt=0)
    looks_back: tuple[Positive, ...] = Field(
        (),
        description="Heads of the first layer that begin by reading the token this many places back, the first head by "
        "the first number: what a Mamba's short convolution gives it for nothing. With biases on the projections.",
    )
    vocab_size: int = Field(1024, ge=300, le=2000, description="Entries of the tokenizer, at most.")

    @model_validator(mode="after")
    def _heads_fit(self) -> TinyTransformer:
        if self.hidden_size % self.num_attention_heads or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must divide hidden_size, and num_key_value_heads the heads")
        if self.looks_back and (
            self.num_key_value_heads < self.num_attention_heads or len(self.looks_back) > self.num_attention_heads
        ):
            raise ValueError("`looks_back` names a number a head, of heads with keys of their own")
        return self


def _kind(value: Any) -> str:
    """A model is a Mamba-2 if nothing is said."""
    return str(value.get("kind", "mamba2") if isinstance(value, dict) else getattr(value, "kind", "mamba2"))


TinyModel = Annotated[
    Annotated[TinyMamba2, Tag("mamba2")] | Annotated[TinyTransformer, Tag("llama")], Discriminator(_kind)
]


class PretrainRecipe(Section):
    """How a small checkpoint of this repository was made."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")
    seed: Seed = 0
    model: TinyModel = TinyMamba2()
    train: Train
    evaluate: Evaluate = Evaluate()

    @model_validator(mode="after")
    def _nothing_to_keep(self) -> PretrainRecipe:
        if self.train.uses("keep", "attention", "reading", "mixing"):
            raise ValueError("a model that is made from nothing has no base to keep and no new head: weights 0")
        return self


R = TypeVar("R", Recipe, PretrainRecipe, AnalysisRecipe)


def load_recipe(path: str | Path, overrides: Sequence[str] = (), kind: type[R] = Recipe) -> R:  # type: ignore[assignment]
    """Reads a recipe and applies `key.path=value` overrides, whose values are YAML themselves.

    Raises:
        RecipeError: no such file, not YAML, duplicate or unknown key, wrong type, bad value; names the key.
    """
    return check_recipe(read_mapping(Path(path), overrides), kind)


def shipped(name: str) -> Path:
    """The file of a recipe that a command runs by itself: in the installed package, or in `recipes/` of a checkout.

    Raises:
        RecipeError: it is in neither place.
    """
    package = Path(__file__).parent
    for folder in (package / "recipes", package.parent / "recipes"):
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    raise RecipeError("recipe", name, "The installation lacks it. Install ssm-surgery again.")


AnyRecipe = Recipe | PretrainRecipe | AnalysisRecipe


def load_any(path: Path, overrides: Sequence[str] = ()) -> AnyRecipe:
    """Reads whichever kind of recipe a file holds.

    One that makes a model from nothing has no `base`; one that analyses a model has `changes` or `sweeps`. What cannot
    be read is taken for a Recipe, whose loading says what is wrong.
    """
    try:
        data = read_mapping(path)
    except RecipeError:
        data = {}
    if "changes" in data or "sweeps" in data:
        return load_recipe(path, overrides, AnalysisRecipe)
    if "model" in data and "base" not in data:
        return load_recipe(path, overrides, PretrainRecipe)
    return load_recipe(path, overrides)


def check_recipe(data: dict[str, Any], kind: type[R] = Recipe) -> R:  # type: ignore[assignment]
    """Validates plain data. Raises RecipeError with one line for each fault, or where a value holds a token."""
    refuse_tokens(data)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        first = faults[0]
        where = ".".join(str(p) for p in first["loc"]) or "recipe"
        found = "missing" if first["type"] == "missing" else repr(first["input"])[:120]
        hint = "This key is not known here; `surgery schema` lists them." if "extra" in first["type"] else first["msg"]
        more = f" ({len(faults) - 1} more: {', '.join('.'.join(map(str, f['loc'])) for f in faults[1:6])})"
        raise RecipeError(where, found, hint + (more if len(faults) > 1 else "")) from None


def to_yaml(recipe: AnyRecipe) -> str:
    """The recipe in full, defaults included."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)


__all__ = [
    "AnalysisRecipe", "Base", "Change", "Checkpoint", "Efficiency", "Evaluate", "Export", "Hardware", "LmEval",
    "Locate", "Optimizer", "PretrainRecipe", "Probe", "Recipe", "Source", "Splice", "Sweep", "Task", "Teacher",
    "TinyMamba2", "TinyTransformer", "Train", "Weights", "as_base", "check_recipe", "load_any", "load_recipe",
    "shipped", "to_yaml",
]  # fmt: skip
