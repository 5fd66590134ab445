"""Schema of recipes that pretrain a small model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, PositiveFloat, Tag, model_validator

from surgery.recipe.evaluate import Evaluate
from surgery.recipe.objectives import OBJECTIVES
from surgery.recipe.section import Plugins, Positive, Section, Seed, ordered
from surgery.recipe.train import Train

VocabSize = Annotated[int, Field(ge=300, le=8192, description="Maximum number of tokens in the vocabulary.")]
PositiveRange = Annotated[tuple[PositiveFloat, PositiveFloat], AfterValidator(ordered)]
TimeStep = Annotated[PositiveRange, Field(description="Range of the initial dt (log-uniform).")]


class TinyMamba2(Section):
    """Shape of a small Mamba-2."""

    kind: Literal["mamba2"] = "mamba2"
    hidden_size: Positive = 128
    num_hidden_layers: Positive = 4
    head_dim: Positive = 32
    state_size: Positive = 16
    n_groups: Positive = 1
    chunk_size: Positive = 32
    time_step: TimeStep = (0.05, 0.5)
    decay: PositiveRange = (0.02, 1.0)
    """Initial -A of the first and the last head (log-spaced)."""
    vocab_size: VocabSize = 1024

    @model_validator(mode="after")
    def _heads_fit(self) -> TinyMamba2:
        if 2 * self.hidden_size % self.head_dim or (2 * self.hidden_size // self.head_dim) % self.n_groups:
            raise ValueError(
                "head_dim must divide 2 * hidden_size, and n_groups must divide 2 * hidden_size / head_dim"
            )
        return self


class TinyTransformer(Section):
    """Shape of a small Transformer (Llama architecture) to use as a teacher."""

    kind: Literal["llama"]
    hidden_size: Positive = 128
    num_hidden_layers: Positive = 4
    num_attention_heads: Positive = 4
    num_key_value_heads: Positive = 4
    intermediate_size: Positive = 256
    initializer_range: float = Field(0.02, gt=0)
    looks_back: tuple[Positive, ...] = ()
    """Initialise heads of the first layer to read the token this many positions back, one number per head, as the short
    convolution of a Mamba does. Adds biases to the projections."""
    vocab_size: VocabSize = 1024

    @model_validator(mode="after")
    def _heads_fit(self) -> TinyTransformer:
        if self.hidden_size % self.num_attention_heads or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                "num_attention_heads must divide hidden_size, and num_key_value_heads must divide num_attention_heads"
            )
        if self.looks_back and (
            self.num_key_value_heads < self.num_attention_heads or len(self.looks_back) > self.num_attention_heads
        ):
            raise ValueError(
                "`looks_back` has at most one number per head, and needs num_key_value_heads = num_attention_heads"
            )
        return self


def _kind(value: Any) -> str:
    """Kind of a model; `mamba2` by default."""
    return str(value.get("kind", "mamba2") if isinstance(value, dict) else getattr(value, "kind", "mamba2"))


TinyModel = Annotated[
    Annotated[TinyMamba2, Tag("mamba2")] | Annotated[TinyTransformer, Tag("llama")], Discriminator(_kind)
]


class PretrainRecipe(Section):
    """Pretrain a small model from scratch."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")
    seed: Seed = 0
    model: TinyModel = TinyMamba2()
    tokenizer_text: str | None = None
    """UTF-8 text file to train the tokenizer on, besides generated text. For `data` with real text."""
    train: Train
    evaluate: Evaluate = Evaluate()
    plugins: Plugins = ()

    @model_validator(mode="after")
    def _only_what_pretraining_does(self) -> PretrainRecipe:
        used = [(name, OBJECTIVES[name]) for name in self.train.objectives]
        unusable = [name for name, objective in used if objective.needs_splice or "base.logits" in objective.needs]
        if self.train.base_texts is not None:
            raise ValueError("Pretraining from scratch has no base that could write `base_text`. Remove it")
        if unusable:
            raise ValueError(
                f"Pretraining from scratch has no base model and no new heads: set {', '.join(unusable)} to 0, and "
                "give `answer` or `lm` a weight"
            )
        for stage in self.train.sequence:
            if stage.trainable != "all":
                raise ValueError(f"Pretraining trains all weights. Remove `trainable: {stage.trainable}`")
            if stage.distil.cache:
                raise ValueError("Pretraining does not store the teacher's logits. Remove `distil.cache`")
        train, evaluate = self.train, self.evaluate
        unused = {
            "train.trackers": train.trackers,
            "train.check_every": train.check_every,
            "evaluate.efficiency": evaluate.efficiency,
            "evaluate.read_twice": evaluate.read_twice,
            "evaluate.lm_eval": evaluate.lm_eval,
            "data.holdout": any(data.holdout for data in train.own_data),
        }
        if names := [name for name, value in unused.items() if value]:
            raise ValueError(f"Pretraining does not use {', '.join(f'`{name}`' for name in names)}. Remove it")
        return self
