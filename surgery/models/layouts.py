"""What models have to tell the toolkit. Owns: the protocols and their values. Must never know: any one model.

A `Structure` is one kind of mixer, wherever it sits; a `Family` says where the mixers of some model types sit.

Shape legend: B batch, T tokens, I inner width (H heads of P), D model width, G groups, N state width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from surgery.errors import PlanError
from surgery.types import MixerSpec


@dataclass(frozen=True)
class HeadSlices:
    """Where one head's weights lie; None where the kind has no such rows.

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
    """One kind of mixer. Its functions are pure: they read modules, and change nothing."""

    kind: str

    def weight_slices(self, spec: MixerSpec, head: int) -> HeadSlices:
        """Where the weights of `head` lie."""

    def in_proj(self, mixer: nn.Module) -> nn.Module | None:
        """The module whose output `streams` reads; None for attention, whose values the cache holds."""

    def out_proj(self, mixer: nn.Module) -> nn.Linear:
        """The projection whose columns are the heads' contributions."""

    def scan_reader(self, mixer: nn.Module) -> nn.Module:
        """The module whose first input is the scan's output, times `Streams.gate` where there is one."""

    def norm_weight(self, mixer: nn.Module) -> Tensor | None:
        """(I,) the weight of the gated norm before `out_proj`, if there is one."""

    def gate_bias(self, mixer: nn.Module) -> Tensor | None:
        """(I,) what is added to z beside `in_proj`'s own bias, if anything."""

    def streams(self, mixer: nn.Module, spec: MixerSpec, projected: Tensor, before: Tensor | None = None) -> Streams:
        """The recurrence's inputs from the output of `in_proj`; `before` (B,channels,kernel) is the conv's state.

        At padding tokens these are not the model's (it zeroes them); real tokens are right, padded or not.
        """

    def skip(self, mixer: nn.Module, x_BHP: Tensor) -> Tensor:
        """`D x`, what the scan adds of the same token."""

    def hidden_attention(self, mixer: nn.Module, spec: MixerSpec, streams: Streams) -> Tensor:
        """(B,H,T,T): weight of token s in the scan's output at token t, without the skip; (B,I,T,T) in Mamba-1.

        Unpadded prompts only.
        """

    def state_numel(self, spec: MixerSpec) -> int:
        """Numbers that decoding keeps for one sequence, whatever its length."""

    def kv_numel(self, spec: MixerSpec) -> int:
        """Numbers that it keeps for each token."""


@dataclass(frozen=True)
class Family:
    """Some model types whose mixers sit in the same places.

    Attributes:
        layout: the mixers of a config, from below; SSM mixers before the attention of the same layer.
        cache_argument: what the model's forward calls its cache.
        hybrid: config class and causal language model class of its hybrids; None where there is none, and
        refuses: the reason why.
        branch_fields: what a branch takes over from a config: `bias`, `conv_bias`, `norm_eps`, `activation`, ...
    """

    name: str
    model_types: tuple[str, ...]
    layout: Callable[[PreTrainedConfig], list[MixerSpec]]
    cache_argument: Literal["cache_params", "past_key_values"] = "past_key_values"
    hybrid: tuple[type[PreTrainedConfig], type[PreTrainedModel]] | None = None
    refuses: str = ""
    branch_fields: Callable[[PreTrainedConfig], dict[str, Any]] = lambda config: {}

    def mixers(self, config: PreTrainedConfig) -> tuple[MixerSpec, ...]:
        """Every mixer, from the config alone."""
        return tuple(self.layout(config))

    def sites(self, config: PreTrainedConfig) -> tuple[MixerSpec, ...]:
        """The mixers that attention can be spliced into: SSM mixers in layers that have no keys and values yet."""
        mixers = self.mixers(config)
        taken = {spec.layer for spec in mixers if not spec.is_ssm}
        return tuple(spec for spec in mixers if spec.is_ssm and spec.layer not in taken) if self.hybrid else ()

    def hybrid_config(self, config: PreTrainedConfig, splice: list[dict[str, Any]]) -> PreTrainedConfig:
        """The config of the hybrid with these spliced sites. Raises PlanError where the family refuses."""
        config_class, _ = self._hybrid(config)
        known = config_class.__dataclass_fields__
        fields = {k: v for k, v in config.to_dict().items() if k not in _WRITTEN and (k != "layer_types" or k in known)}
        return config_class(**{**fields, "splice": splice})

    def build_hybrid(self, config: PreTrainedConfig) -> PreTrainedModel:
        """The hybrid class on that config, weights not loaded yet."""
        return self._hybrid(config)[1](config)

    def _hybrid(self, config: PreTrainedConfig) -> tuple[type[PreTrainedConfig], type[PreTrainedModel]]:
        if self.hybrid is None:
            raise PlanError("base.model", config.model_type, f"Nothing can be spliced there: {self.refuses}")
        return self.hybrid


# What transformers writes beside a config's own fields.
_WRITTEN = ("model_type", "architectures", "auto_map", "transformers_version", "_name_or_path")
