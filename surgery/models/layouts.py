"""Describe models to the toolkit: a `Structure` is one kind of mixer, a `Family` places mixers in some model types.

Shape legend: B batch, T tokens, I inner width (H heads of P), D model width, G groups, N state width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from surgery.errors import PlanError
from surgery.registry import Registry
from surgery.types import MixerSpec


@dataclass(frozen=True)
class HeadSlices:
    """The rows and columns of one head's weights; None where the kind has no such rows.

    Attributes:
        gate, value, key, query: rows of `in_proj` for z, x, B and C.
        conv_value, conv_key, conv_query: channels of the short convolution.
        out: columns of `out_proj`, which are also the channels of the gated norm.
    """

    out: slice
    gate: slice | None = None
    value: slice | None = None
    key: slice | None = None
    query: slice | None = None
    conv_value: slice | None = None
    conv_key: slice | None = None
    conv_query: slice | None = None


@dataclass(frozen=True)
class Streams:
    """The inputs of the recurrence, after the short convolution.

    Attributes:
        x: (B,T,H,P) values.
        key, query: (B,T,G,N), B and C.
        step: (B,T,H), dt after softplus and its limits; (B,T,I) in Mamba-1; the logarithm of the decay in Llamba.
        gate: (B,T,I), silu(z), where it multiplies the scan's output; None where a gated norm follows.
    """

    x: Tensor
    key: Tensor
    query: Tensor
    step: Tensor
    gate: Tensor | None = None


class Structure(Protocol):
    """One kind of mixer. Its methods read modules and do not change them.

    Attributes:
        kind: its name, which `MixerSpec.kind` refers to; it ends with `attention` for softmax attention only.
        chunked: whether its scan works on chunks, of the mixer's `chunk_size`.
    """

    kind: str
    chunked: bool

    def weight_slices(self, spec: MixerSpec, head: int) -> HeadSlices:
        """Return the rows and columns of `head`."""

    def in_proj(self, mixer: nn.Module) -> nn.Module | None:
        """Return the module whose output `streams` reads; None for attention, whose values are in the cache."""

    def out_proj(self, mixer: nn.Module) -> nn.Linear:
        """Return the projection whose columns are the heads' contributions."""

    def scan_reader(self, mixer: nn.Module) -> nn.Module:
        """Return the module whose first input is the scan's output, times `Streams.gate` where there is one."""

    def norm_weight(self, mixer: nn.Module) -> Tensor | None:
        """Return (I,) the weight of the gated norm before `out_proj`, if there is one."""

    def gate_bias(self, mixer: nn.Module) -> Tensor | None:
        """Return (I,) the bias of z besides `in_proj`'s own, if there is one."""

    def streams(self, mixer: nn.Module, spec: MixerSpec, projected: Tensor, before: Tensor | None = None) -> Streams:
        """Compute the recurrence's inputs from the output of `in_proj`.

        They are right at real tokens only: the model zeroes padding before this point.

        Args:
            before: (B,channels,kernel), the convolution's state.
        """

    def skip(self, mixer: nn.Module, x_BHP: Tensor) -> Tensor:
        """Return `D x`, which the scan adds for the same token."""

    def hidden_attention(self, mixer: nn.Module, spec: MixerSpec, streams: Streams) -> Tensor:
        """Return (B,H,T,T): weight of token s in the scan's output at token t, without the skip; (B,I,T,T) in Mamba-1.

        Unpadded prompts only.
        """

    def state_numel(self, spec: MixerSpec) -> int:
        """Count the numbers that the cache keeps for one sequence of any length."""

    def kv_numel(self, spec: MixerSpec) -> int:
        """Count the numbers that the cache keeps for each token."""


_MIXERS = "surgery.models.mixers"
STRUCTURES: Registry[Structure] = Registry(
    "mixer structure", [f"{_MIXERS}.{name}" for name in ("mamba2", "mamba1", "llamba", "attention")]
)

S = TypeVar("S", bound=type[Any])


def register_structure(structure: S) -> S:
    """Decorate a class with the methods of `Structure`: `MixerSpec(kind=...)` then refers to its `kind`.

    Raises:
        RecipeError: another class has this kind.
    """
    STRUCTURES.register(structure.kind, structure())
    return structure


CacheArgument = Literal["cache_params", "past_key_values"]
HybridClasses = tuple[type[PreTrainedConfig], type[PreTrainedModel], type[PreTrainedModel]]


@dataclass(frozen=True)
class Family:
    """Model types whose mixers sit in the same places.

    Attributes:
        model_types: of plain models and of hybrids.
        layout: the mixers of a config, from below; SSM mixers before the attention of the same layer.
        cache_argument: the name of the cache in the model's forward.
        hybrid: config, model and causal language model of its hybrids; None where nothing can be spliced, and
        refuses: the reason for it.
        branch_fields: the fields that a branch copies from a config: `bias`, `conv_bias`, `norm_eps`, `activation`, ...
        tiny: the config of a tiny model, of at least three layers and four heads, which the tests of all families use.
        is_donor: whether its attention can be transplanted (`splice.teacher`).
        groups_channels: whether `base.channels_per_head` makes its heads, as in Mamba-1.
        norm_by_group_since: release of transformers whose gated norm is per group, as the model was trained.
    """

    name: str
    model_types: tuple[str, ...]
    layout: Callable[[PreTrainedConfig], list[MixerSpec]]
    cache_argument: CacheArgument = "past_key_values"
    hybrid: HybridClasses | None = None
    refuses: str = ""
    branch_fields: Callable[[PreTrainedConfig], dict[str, Any]] = lambda config: {}
    tiny: Callable[..., PreTrainedConfig] | None = None
    is_donor: bool = False
    groups_channels: bool = False
    norm_by_group_since: str = ""

    def is_hybrid(self, config: PreTrainedConfig) -> bool:
        """Return whether the config, of this family, is of its hybrids."""
        return self.hybrid is not None and config.model_type == self.hybrid[0].model_type

    def mixers(self, config: PreTrainedConfig) -> tuple[MixerSpec, ...]:
        """Return every mixer, from the config only."""
        return tuple(self.layout(config))

    def sites(self, config: PreTrainedConfig) -> tuple[MixerSpec, ...]:
        """Return the mixers that attention can be spliced into: SSM mixers of layers without keys and values."""
        mixers = self.mixers(config)
        taken = {spec.layer for spec in mixers if not spec.is_ssm}
        return tuple(spec for spec in mixers if spec.is_ssm and spec.layer not in taken) if self.hybrid else ()

    def hybrid_config(self, config: PreTrainedConfig, splice: list[dict[str, Any]]) -> PreTrainedConfig:
        """Return the config of the hybrid with these spliced sites. Raises PlanError where nothing can be spliced."""
        config_class, _, _ = self._hybrid(config)
        known = config_class.__dataclass_fields__
        fields = {k: v for k, v in config.to_dict().items() if k not in _WRITTEN and (k != "layer_types" or k in known)}
        return config_class(**{**fields, "splice": splice})

    def build_hybrid(self, config: PreTrainedConfig) -> PreTrainedModel:
        """Build the hybrid of that config, without loading weights."""
        _, _, model_class = self._hybrid(config)
        return model_class(config)

    def _hybrid(self, config: PreTrainedConfig) -> HybridClasses:
        if self.hybrid is None:
            raise PlanError("base.model", config.model_type, f"Nothing can be spliced into it: {self.refuses}")
        return self.hybrid


# Keys that transformers adds to a config's own fields.
_WRITTEN = ("model_type", "architectures", "auto_map", "transformers_version", "_name_or_path")
