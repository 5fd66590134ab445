"""Describe models to the toolkit: a `Structure` is one kind of mixer, a `Family` places mixers in some model types.

Shape legend: B batch, T tokens, I inner width (H heads of P), D model width, G groups, N state width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from surgery.errors import PlanError
from surgery.registry import Registry
from surgery.types import MixerSpec


@dataclass(frozen=True)
class HeadSlices:
    """Rows and columns of one head in the mixer's weights; None if the kind of mixer has no such rows.

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
        step: (B,T,H), dt after softplus and clamping. In Mamba-1 (B,T,I); in Llamba the logarithm of the decay.
        gate: (B,T,I), silu(z) if it multiplies the scan's output; None if a gated norm follows.
    """

    x: Tensor
    key: Tensor
    query: Tensor
    step: Tensor
    gate: Tensor | None = None

    def in_fp32(self) -> Streams:
        """Return the inputs in fp32 at least, since sums of steps over tokens are exponentiated."""
        wide = torch.promote_types(self.x.dtype, torch.float32)
        return replace(self, **{name: getattr(self, name).to(wide) for name in ("x", "key", "query", "step")})


class Structure:
    """Interface of one kind of mixer, with defaults for subclasses. Its methods do not change the modules.

    Attributes:
        kind: name that `MixerSpec.kind` refers to. It ends with `attention` for softmax attention only.
    """

    kind: str

    def weight_slices(self, spec: MixerSpec, head: int) -> HeadSlices:
        """Return the rows and columns of `head`."""
        raise NotImplementedError

    def in_proj(self, mixer: nn.Module) -> nn.Module | None:
        """Return the module whose output `streams` takes; None for attention, whose values are in the cache."""
        module: nn.Module = mixer.in_proj
        return module

    def out_proj(self, mixer: nn.Module) -> nn.Linear:
        """Return the projection whose columns are the heads' contributions."""
        linear: nn.Linear = mixer.out_proj
        return linear

    def scan_reader(self, mixer: nn.Module) -> nn.Module:
        """Return the module whose first input is the scan's output, multiplied by `Streams.gate` if there is one."""
        return self.out_proj(mixer)

    def norm_weight(self, mixer: nn.Module) -> Tensor | None:
        """Return the weight (I,) of the gated norm before `out_proj`, or None."""
        return None

    def gate_bias(self, mixer: nn.Module) -> Tensor | None:
        """Return the bias (I,) that is added to z besides that of `in_proj`, or None."""
        return None

    def streams(self, mixer: nn.Module, spec: MixerSpec, projected: Tensor, before: Tensor | None = None) -> Streams:
        """Compute the recurrence's inputs from the output of `in_proj`.

        The result is valid at real tokens only, since the model zeroes padding before this point.

        Args:
            projected: (B,T,...) output of `in_proj`.
            before: (B,channels,kernel) state of the convolution before the first token; zeros if None. For a single
                token it may have fewer rows, which B repeats.
        """
        raise NotImplementedError

    def skip(self, mixer: nn.Module, x_BHP: Tensor) -> Tensor:
        """Return `D x`, (B,H,P), which the scan adds at the same token."""
        raise NotImplementedError

    def hidden_attention(self, mixer: nn.Module, spec: MixerSpec, streams: Streams) -> Tensor:
        """Return (B,H,T,T), the weight of token s in the scan's output at token t, without the skip.

        In Mamba-1 (B,I,T,T). Prompts must not be padded.
        """
        raise NotImplementedError


@runtime_checkable
class ReadsState(Protocol):
    """A structure that can run a token without the state after it. Locating is faster with it, and works without."""

    def step_from_state(
        self, mixer: nn.Module, spec: MixerSpec, u_R1D: Tensor, before: Tensor, state_BHPN: Tensor, copies: int = 1
    ) -> Tensor:
        """Return the mixer's output (R*copies,1,D) at one token. It calls the mixer's modules, so that hooks fire.

        Args:
            u_R1D: the mixer's input. Row w*B + b continues the states b.
            before: (B,channels,kernel) state of the convolution.
            state_BHPN: state of the recurrence.
            copies: repeat the rows before the module of `scan_reader`, where variants with equal inputs separate.
        """


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


HybridClasses = tuple[type[PreTrainedConfig], type[PreTrainedModel], type[PreTrainedModel]]


@dataclass(frozen=True)
class Family:
    """Model types whose mixers are at the same module paths.

    Attributes:
        model_types: model types of plain models and of hybrids.
        layout: function from a config to its mixers, from the lowest layer up. Within a layer, the SSM mixer comes
            before attention.
        reads_positions: whether the model's forward takes `position_ids`, and masks by kind of layer.
        hybrid: classes of its hybrids (config, model, causal language model); None if nothing can be spliced.
        refuses: the reason if nothing can be spliced.
        branch_fields: function from a config to the fields that a branch copies: `bias`, `conv_bias`, `norm_eps`, ...
        tiny: function that returns the config of a tiny model (three or more layers, four heads), for the tests of all
            families.
        is_donor: whether its attention can be transplanted (`splice.teacher`).
        groups_channels: whether `base.channels_per_head` defines its heads, as in Mamba-1.
        state_field: field of the config that holds the width of B and C, if the state can be cut; `field.key` for a
            key of a mapping. Rows of B and C must be in `in_proj` and in the short convolution. Empty if it cannot be
            cut.
        lower_limit: field of the config that the class of transformers limits dt with, from below, if that is not
            `time_step_limit`.
    """

    name: str
    model_types: tuple[str, ...]
    layout: Callable[[PreTrainedConfig], list[MixerSpec]]
    reads_positions: bool = True
    hybrid: HybridClasses | None = None
    refuses: str = ""
    branch_fields: Callable[[PreTrainedConfig], dict[str, Any]] = lambda config: {}
    tiny: Callable[..., PreTrainedConfig] | None = None
    is_donor: bool = False
    groups_channels: bool = False
    state_field: str = ""
    lower_limit: str = ""

    def is_hybrid(self, config: PreTrainedConfig) -> bool:
        """Return whether the config, of this family, is of its hybrids."""
        return self.hybrid is not None and config.model_type == self.hybrid[0].model_type

    def mixers(self, config: PreTrainedConfig) -> tuple[MixerSpec, ...]:
        """Return all mixers, from the config only."""
        return tuple(self.layout(config))

    def sites(self, config: PreTrainedConfig) -> tuple[MixerSpec, ...]:
        """Return the mixers that attention can be spliced into: SSM mixers of layers without keys and values."""
        mixers = self.mixers(config)
        taken = {spec.layer for spec in mixers if not spec.is_ssm}
        return tuple(spec for spec in mixers if spec.is_ssm and spec.layer not in taken) if self.hybrid else ()

    def why_not(self, config: PreTrainedConfig) -> str:
        """Return why attention cannot be spliced into a model of this config; empty if it can."""
        if self.refuses or self.sites(config):
            return self.refuses
        return "it has no layer with an SSM and no attention. It needs one to splice into."

    def hybrid_config(self, config: PreTrainedConfig, splice: list[dict[str, Any]]) -> PreTrainedConfig:
        """Return the config of a hybrid with these spliced sites."""
        assert self.hybrid is not None, self.refuses
        config_class = self.hybrid[0]
        known = config_class.__dataclass_fields__
        fields = {k: v for k, v in config.to_dict().items() if k not in _WRITTEN and (k != "layer_types" or k in known)}
        return config_class(**{**fields, "splice": splice})

    def with_state_size(self, config: PreTrainedConfig, size: int) -> PreTrainedConfig:
        """Return a copy of a config with another width of B and C. Raises PlanError if the state cannot be cut."""
        name, _, key = self.state_field.partition(".")
        if not name:
            raise PlanError("state_size", size, f"The state of {self.name} models cannot be cut.")
        config = copy.deepcopy(config)
        setattr(config, name, {**getattr(config, name), key: size} if key else size)
        return config

    def build_hybrid(self, config: PreTrainedConfig) -> PreTrainedModel:
        """Build the hybrid of a config, without loading weights."""
        assert self.hybrid is not None, self.refuses
        return self.hybrid[2](config)


# Keys that transformers adds to a config's own fields.
_WRITTEN = ("model_type", "architectures", "auto_map", "transformers_version", "_name_or_path")
