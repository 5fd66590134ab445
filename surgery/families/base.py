"""What a family of models has to tell the toolkit. Owns: the protocol and its values. Must never know: any one family.

Shape legend: B batch, T tokens, I inner width (H heads of P), D model width, G groups, N state width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from surgery.heads import MixerSpec


@dataclass(frozen=True)
class HeadSlices:
    """Where one head's weights lie.

    Attributes:
        gate, value, key, query, step: rows of `in_proj` for z, x, B, C and dt.
        conv_value, conv_key, conv_query: channels of the short convolution.
        out: columns of `out_proj`, which are also the channels of the gated norm.
    """

    gate: slice
    value: slice
    key: slice
    query: slice
    step: slice
    conv_value: slice
    conv_key: slice
    conv_query: slice
    out: slice


@dataclass(frozen=True)
class Streams:
    """The inputs of the recurrence, after the short convolution.

    Attributes:
        x: (B,T,H,P) values.
        key, query: (B,T,G,N), Mamba-2's B and C.
        step: (B,T,H), dt after softplus and its limits.
    """

    x: Tensor
    key: Tensor
    query: Tensor
    step: Tensor


class Family(Protocol):
    """One mixer structure. The functions of a family are pure: they read configs and modules, and change nothing."""

    name: str
    model_types: tuple[str, ...]

    def mixers(self, config: PreTrainedConfig) -> tuple[MixerSpec, ...]:
        """The SSM mixers, from the config alone."""

    def weight_slices(self, spec: MixerSpec, head: int) -> HeadSlices:
        """Where the weights of `head` lie."""

    def block(self, model: PreTrainedModel, layer: int) -> nn.Module:
        """The block whose output is the residual stream above `layer`."""

    def mixer(self, model: PreTrainedModel, layer: int) -> nn.Module:
        """The SSM mixer of that block."""

    def in_proj(self, mixer: nn.Module) -> nn.Module:
        """The module whose output `streams` reads."""

    def out_proj(self, mixer: nn.Module) -> nn.Linear:
        """The projection whose columns are the heads' contributions."""

    def gated_norm(self, mixer: nn.Module) -> nn.Module:
        """The module that takes (scan output, gate): the last place where heads are apart before they are mixed."""

    def residual_scale(self, config: PreTrainedConfig) -> float:
        """What the mixer's output is multiplied with where it joins the residual stream."""

    def streams(self, mixer: nn.Module, projected: Tensor, conv_state: Tensor | None = None) -> Streams:
        """The recurrence's inputs from the output of `in_proj`; `conv_state` (B,channels,kernel) came before.

        At padding tokens these are not the model's (it zeroes them); real tokens are right, padded or not.
        """

    def hidden_attention(self, mixer: nn.Module, streams: Streams) -> Tensor:
        """(B,H,T,T): weight of token s in the scan's output at token t, without the skip D. Unpadded prompts only."""

    def resume(
        self, model: PreTrainedModel, layer: int, hidden: Tensor, attention_mask: Tensor | None, keep_last: bool
    ) -> Tensor:
        """Runs the blocks above `layer` on the residual stream and returns logits, of the last token if asked."""

    def hybrid_config(self, config: PreTrainedConfig, splice: list[dict[str, Any]]) -> PreTrainedConfig:
        """The config of the hybrid with these spliced sites."""

    def build_hybrid(self, config: PreTrainedConfig) -> PreTrainedModel:
        """The hybrid class on that config, weights not loaded yet."""
