"""Mamba-2 with the attention layers and MLPs that mamba_ssm's models may have (`mamba2attn-*`), and spliced heads.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only. The layouts are
mamba_ssm's (`modules/mha.py`, `mlp.py`, `block.py`; arXiv 2405.21060, section 9.2), and so are the tensor names.

Decoding equals the full forward pass here. mamba_ssm's own decoding keeps the convolution's output as its state, which
its full pass does not.

Shape legend: B batch, T new tokens, S tokens in the cache and new ones, H query heads, G key/value heads, P head width,
C channels of q, k and v together, K half the rotated width, D model width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import (
    Mamba2Block,
    Mamba2ForCausalLM,
    Mamba2Mixer,
    Mamba2Model,
    Mamba2PreTrainedModel,
    Mamba2RMSNorm,
)
from transformers.utils.output_capturing import OutputRecorder

from .configuration_hybrid import HybridConfigMixin
from .modeling_hybrid import (
    HybridCausalLMMixin,
    HybridInitMixin,
    HybridMixerMixin,
    HybridModelMixin,
    LogitsMixin,
    RecordingMixin,
    SplicedAttention,
    SplicePass,
    attend,
    convolved,
    masked,
)

# The keys of mamba_ssm's `attn_cfg` that are kept, and its defaults. `causal` has to be true and is not kept.
ATTENTION_DEFAULTS = {
    "num_heads_kv": None,
    "head_dim": None,
    "qkv_proj_bias": True,
    "out_proj_bias": True,
    "softmax_scale": None,
    "d_conv": 0,
    "rotary_emb_dim": 0,
    "rotary_emb_base": 10000.0,
    "rotary_emb_interleaved": False,
}
MLP_MULTIPLE = 128  # mamba_ssm rounds `d_intermediate` up to it


class Mamba2AttnConfig(HybridConfigMixin, Mamba2Config):
    """Mamba2Config, `splice`, and the fields of mamba_ssm's config for attention and MLPs, under its names.

    Fields:
        attn_layer_idx: layers whose mixer is attention.
        attn_cfg: `num_heads` and the keys of `ATTENTION_DEFAULTS`; the same for all those layers.
        d_intermediate: width of the gated MLP after every mixer, before it is rounded up; 0 for none.
    """

    model_type = "mamba2attn_hybrid"

    splice: list | None = None
    attn_layer_idx: list | None = None
    attn_cfg: dict | None = None
    d_intermediate: int = 0

    @property
    def layer_types(self) -> list[str]:
        """The kind of cache of each layer."""
        kind = "hybrid" if (self.attn_cfg or {}).get("d_conv") else "full_attention"
        attention = set(self.attn_layer_idx or ())
        return self.cache_types([kind if i in attention else "linear_attention" for i in range(self.num_hidden_layers)])


class AttentionWeights(nn.Identity):
    """A module that the weights pass through, so that transformers can record them."""


class MambaSsmAttention(nn.Module):
    """Causal attention as in mamba_ssm's `MHA`: projection, short convolution if any, rotary if any, softmax.

    Args:
        config: `hidden_size`, `attn_cfg` and `_attn_implementation` are read.
        layer_idx: index of the layer, which is also its slot in the cache.
    """

    is_causal = True

    def __init__(self, config: Mamba2AttnConfig, layer_idx: int) -> None:
        super().__init__()
        fields = {**ATTENTION_DEFAULTS, **(config.attn_cfg or {})}
        self.config, self.layer_idx = config, layer_idx
        self.num_heads = fields["num_heads"]
        self.num_kv_heads = fields["num_heads_kv"] or self.num_heads
        self.num_key_value_groups = self.num_heads // self.num_kv_heads
        self.head_dim = fields["head_dim"] or config.hidden_size // self.num_heads
        self.scaling = fields["softmax_scale"] or self.head_dim**-0.5
        self.conv_kernel, self.rotary_dim = fields["d_conv"], fields["rotary_emb_dim"]
        self.rotary_base, self.interleaved = fields["rotary_emb_base"], fields["rotary_emb_interleaved"]
        channels = self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        self.in_proj = nn.Linear(config.hidden_size, channels, bias=fields["qkv_proj_bias"])
        if self.conv_kernel:
            self.conv1d = nn.Conv1d(channels, channels, self.conv_kernel, groups=channels)
        self.out_proj = nn.Linear(self.head_dim * self.num_heads, config.hidden_size, bias=fields["out_proj_bias"])
        self.weights = AttentionWeights()

    def forward(
        self,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        splice_pass: SplicePass | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """(B,T,D) -> (B,T,D).

        Args:
            cache: a transformers Cache, updated in place; None for none.
            attention_mask: (B,T), 0 on padding; None when there is none.
            splice_pass: has the causal mask; without it no token may be padding.
        """
        past = 0 if cache is None else cache.get_seq_length(self.layer_idx)
        qkv_BTC = self.in_proj(hidden_states)
        if self.conv_kernel:
            documents = splice_pass.documents if splice_pass is not None else None
            qkv_BTC = self._convolve(qkv_BTC, cache, attention_mask, documents)
        heads_BHTP = qkv_BTC.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        query_and_key, value = heads_BHTP.tensor_split([-self.num_kv_heads], dim=1)
        if self.rotary_dim:
            query_and_key = self._rotate(query_and_key, past)
        query, key = query_and_key.tensor_split([self.num_heads], dim=1)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        causal = splice_pass.causal if splice_pass is not None else None
        mixed_BTHP, weights = attend(self, query, key, value, causal, self.scaling)
        if weights is not None:
            self.weights(weights)
        return self.out_proj(mixed_BTHP.flatten(2))

    def _convolve(self, qkv_BTC: Tensor, cache: Any, padding: Tensor | None, documents: Tensor | None) -> Tensor:
        """Run the short causal convolution over all channels, without activation; its state is in the cache."""
        qkv_BTC = masked(qkv_BTC, padding)  # after the projection, whose bias padding would have too
        x_BCT, T = qkv_BTC.transpose(1, 2), qkv_BTC.shape[1]
        if cache is not None:
            x_BCT = cache.update_conv_state(x_BCT, self.layer_idx, conv_kernel_size=self.conv_kernel)
        return convolved(self.conv1d, self.conv_kernel, x_BCT, T, documents).transpose(1, 2)

    def _rotate(self, x_BHTP: Tensor, past: int | Tensor) -> Tensor:
        """Rotate the first `rotary_dim` dimensions by position; left padding only shifts all positions of a row."""
        dtype = torch.promote_types(x_BHTP.dtype, torch.float32)
        fraction_K = torch.arange(0, self.rotary_dim, 2, device=x_BHTP.device, dtype=dtype) / self.rotary_dim
        place_T = past + torch.arange(x_BHTP.shape[2], device=x_BHTP.device)
        angle_TK = place_T[:, None].to(dtype) * self.rotary_base**-fraction_K
        cos, sin = angle_TK.cos(), angle_TK.sin()
        rotated, rest = x_BHTP[..., : self.rotary_dim].to(dtype), x_BHTP[..., self.rotary_dim :]
        if self.interleaved:
            first, second = rotated[..., 0::2], rotated[..., 1::2]
        else:
            first, second = rotated.chunk(2, dim=-1)
        parts = (first * cos - second * sin, first * sin + second * cos)
        rotated = torch.stack(parts, dim=-1).flatten(-2) if self.interleaved else torch.cat(parts, dim=-1)
        return torch.cat((rotated.to(x_BHTP.dtype), rest), dim=-1)


class MambaSsmMLP(nn.Module):
    """mamba_ssm's `GatedMLP`: rows of `fc1` are [value | gate]."""

    def __init__(self, config: Mamba2AttnConfig) -> None:
        super().__init__()
        width = -(-config.d_intermediate // MLP_MULTIPLE) * MLP_MULTIPLE
        self.fc1 = nn.Linear(config.hidden_size, 2 * width, bias=False)
        self.fc2 = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """(B,T,D) -> (B,T,D)."""
        value, gate = self.fc1(hidden_BTD).chunk(2, dim=-1)
        return self.fc2(value * F.silu(gate))


class Mamba2AttnMixer(HybridMixerMixin, Mamba2Mixer):
    """`Mamba2Mixer` with a branch where the config splices one."""


class Mamba2AttnBlock(Mamba2Block):
    """`Mamba2Block` with an MLP and a norm of its own after the mixer."""

    def __init__(self, config: Mamba2AttnConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.norm2 = Mamba2RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mlp = MambaSsmMLP(config)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(B,T,D) -> (B,T,D)."""
        residual = super().forward(hidden_states, *args, **kwargs)
        return residual + self.mlp(self.norm2(residual.to(self.norm2.weight.dtype)))


class Mamba2AttnPreTrainedModel(HybridInitMixin, Mamba2PreTrainedModel):
    """Flags and initialisation common to both classes."""

    config_class = Mamba2AttnConfig
    _can_set_attn_implementation_cached_value = True  # transformers would look for its attention functions in this file


class Mamba2AttnModel(HybridModelMixin, RecordingMixin, Mamba2AttnPreTrainedModel, Mamba2Model):
    """`Mamba2Model` whose layers may be attention, may have MLPs, and whose SSM mixers may have a branch."""

    reads_positions = False
    _makes_masks = True
    _can_record_outputs = {"attentions": [SplicedAttention, OutputRecorder(AttentionWeights)]}

    def __init__(self, config: Mamba2AttnConfig) -> None:
        super().__init__(config)
        for index in range(config.num_hidden_layers):
            if config.d_intermediate:
                self.layers[index] = Mamba2AttnBlock(config, index)
            if index in (config.attn_layer_idx or ()):
                self.layers[index].mixer = MambaSsmAttention(config, index)
            else:
                self.layers[index].mixer = Mamba2AttnMixer(config, index, initialize_mixer_weights=False)
        self._no_split_modules = ["Mamba2AttnBlock" if config.d_intermediate else "Mamba2Block"]
        if self.is_gradient_checkpointing:  # by the config, which told the plain blocks
            self.gradient_checkpointing_enable()
        self.post_init()


class Mamba2AttnForCausalLM(
    HybridCausalLMMixin, LogitsMixin, Mamba2AttnPreTrainedModel, Mamba2ForCausalLM, GenerationMixin
):
    """Mamba-2 language model with attention layers."""

    def __init__(self, config: Mamba2AttnConfig) -> None:
        super(Mamba2ForCausalLM, self).__init__(config)
        backbone = Mamba2AttnModel(config)
        self._no_split_modules = backbone._no_split_modules
        self._build(backbone)


__all__ = ["Mamba2AttnConfig", "Mamba2AttnForCausalLM", "Mamba2AttnModel", "Mamba2AttnPreTrainedModel"]
