"""The spliced attention head, and the mixin that adds it to an SSM mixer.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only. It must never
know how heads are found, planned or trained.

A hybrid mixer computes `ssm(u) + attention(u)`. The branch has softmax attention with no position code, a short causal
convolution and a gate like the SSM head whose place it takes (Mamba-2: C is its query, B its key, x its value;
arXiv 2405.21060), and an RMSNorm per head before its output projection.

Shape legend: B batch, T new tokens, S tokens in the cache and new ones, H spliced heads of this layer, K query/key
width, V value width, D model width, Q rows asked for.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.versions import require_version

# Older releases decode layers that have a convolution state, a recurrent state and keys and values at once wrongly,
# without an error.
require_version("transformers>=5.21,<6", "This hybrid checkpoint needs it: pip install 'transformers>=5.21,<6'.")

CONV_STATE = 1  # the branch's own convolution state; state 0 is the SSM's


def splice_sites(splice: list | None) -> dict[int, dict[str, Any]]:
    """The config field `splice` by layer index."""
    return {site["layer"]: site for site in splice or []}


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The reference: (B,H,T,K), (B,H,S,K), (B,H,S,V) -> (B,T,H,V) and the weights (B,H,T,S)."""
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2), weights


class SplicedAttention(nn.Module):
    """The attention heads that one layer received.

    Args:
        config: the hybrid's config; `hidden_size`, `use_bias`, `use_conv_bias`, `_attn_implementation` are read.
        site: this layer's entry of `config.splice`: `heads`, `mode`, `qk_width`, `v_width`, `conv_kernel`,
            `activation` (`silu` or None) and `gate`.
        layer_idx: index of the layer, which is also its slot in the cache.
    """

    is_causal = True
    num_key_value_groups = 1

    def __init__(self, config: Any, site: Mapping[str, Any], layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.num_heads, self.qk_width, self.v_width = len(site["heads"]), site["qk_width"], site["v_width"]
        self.conv_kernel, self.mode, self.silu = site["conv_kernel"], site["mode"], site["activation"] == "silu"
        self.initial_scale = 1.0 if self.silu else self.qk_width**-0.5
        self.widths = [self.num_heads * w for w in (self.qk_width, self.qk_width, self.v_width)]
        channels = sum(self.widths)
        self.qkv_proj = nn.Linear(config.hidden_size, channels, bias=config.use_bias)
        self.conv1d = nn.Conv1d(
            channels, channels, self.conv_kernel, groups=channels, bias=config.use_conv_bias, padding=0
        )
        self.gate_proj = nn.Linear(config.hidden_size, self.widths[2], bias=config.use_bias) if site["gate"] else None
        self.scale = nn.Parameter(torch.full((self.num_heads,), self.initial_scale))
        self.o_proj = nn.Linear(self.widths[2], config.hidden_size, bias=False)

    def initialize(self) -> None:
        """Initial values where a checkpoint has none; in `add` mode the branch is silent until it is trained."""
        init.constant_(self.scale, self.initial_scale)
        init.kaiming_uniform_(self.conv1d.weight, a=math.sqrt(5))
        if self.mode == "add":
            init.zeros_(self.o_proj.weight)

    def forward(
        self,
        u_BTD: Tensor,
        cache: Any = None,
        padding_mask: Tensor | None = None,
        causal_mask: Any = None,
        rows: "SpliceRows | None" = None,
    ) -> Tensor:
        """(B,T,D) -> (B,T,D).

        Args:
            cache: a transformers Cache whose layer `layer_idx` is of type `hybrid`; updated in place.
            padding_mask: (B,T), 0 on padding; None when there is none.
            causal_mask: as made by transformers' `create_causal_mask` for the implementation in use.
            rows: collects attention rows that the caller asked for.
        """
        if padding_mask is not None:
            u_BTD = u_BTD * padding_mask[:, :, None].to(u_BTD.dtype)
        query, key, value = self._qkv(u_BTD, cache)
        if rows is not None:
            rows.collect(self.layer_idx, query, key, padding_mask)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        implementation = self.config._attn_implementation
        if "flash" in implementation and self.v_width > self.qk_width:
            # The flash wrapper crops values that are wider than keys; zeros change no score.
            query, key = (F.pad(x, (0, self.v_width - self.qk_width)) for x in (query, key))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        mixed_BTHV, _ = attend(self, query, key, value, causal_mask, scaling=1.0, dropout=0.0)
        if self.gate_proj is not None:
            gate = self.gate_proj(u_BTD).view(mixed_BTHV.shape)
            mixed_BTHV = mixed_BTHV * F.silu(gate)
        return self.o_proj(self._rms_norm(mixed_BTHV).flatten(2))

    def _qkv(self, u_BTD: Tensor, cache: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Projections, short causal convolution, activation; the query is scaled. Each (B,H,T,width)."""
        x_BCT = self.qkv_proj(u_BTD).transpose(1, 2)
        T = x_BCT.shape[-1]
        if cache is not None:
            x_BCT = cache.update_conv_state(
                x_BCT, self.layer_idx, state_idx=CONV_STATE, conv_kernel_size=self.conv_kernel
            )
        x_BCT = F.pad(x_BCT, (self.conv_kernel - 1, 0))
        x_BCT = F.conv1d(x_BCT, self.conv1d.weight, self.conv1d.bias, groups=x_BCT.shape[1])[..., -T:]
        x_BTC = (F.silu(x_BCT) if self.silu else x_BCT).transpose(1, 2)
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in x_BTC.split(self.widths, dim=-1)
        )
        return query * self.scale[:, None, None], key, value

    def _rms_norm(self, x_BTHV: Tensor) -> Tensor:
        """RMSNorm of every head by itself, in fp32, without a weight: `o_proj` can hold it."""
        x = x_BTHV.float()
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.layer_norm_epsilon)).to(x_BTHV.dtype)


class SpliceRows:
    """Attention rows of chosen query tokens: the way attention supervision reaches the loss.

    One object travels down one forward pass; layers put their rows in. It is closed when the pass ends: gradient
    checkpointing recomputes the rows, since it has to save the same tensors again, but they are not kept twice.

    Args:
        queries_BQ: (B,Q) token indices, -1 where there is none.
    """

    def __init__(self, queries_BQ: Tensor) -> None:
        self.queries_BQ = queries_BQ
        self._rows: dict[int, Tensor] | None = {}

    def collect(self, layer: int, query_BHTK: Tensor, key_BHTK: Tensor, padding_mask: Tensor | None) -> None:
        """Computes softmax rows (B,H,Q,T) in fp32 for this layer."""
        index_BQ = self.queries_BQ.clamp(min=0)
        rows_BHQK = query_BHTK.gather(
            2, index_BQ[:, None, :, None].expand(-1, query_BHTK.shape[1], -1, query_BHTK.shape[3])
        )
        scores = rows_BHQK.float() @ key_BHTK.float().transpose(2, 3)
        seen_BQT = torch.arange(key_BHTK.shape[2], device=scores.device) <= index_BQ[..., None]
        if padding_mask is not None:
            seen_BQT = seen_BQT & padding_mask[:, None, :].bool()
        scores = scores.masked_fill(~seen_BQT[:, None], torch.finfo(scores.dtype).min)
        asked = (self.queries_BQ >= 0)[:, None, :, None]
        rows_BHQT = torch.where(asked, scores.softmax(-1), 0.0)
        if self._rows is not None:
            self._rows[layer] = rows_BHQT

    def take(self) -> tuple[Tensor, ...]:
        """The rows by layer, from below; closes the collection."""
        rows, self._rows = self._rows or {}, None
        return tuple(rows[layer] for layer in sorted(rows))


def _silence(module: nn.Module, args: Any, output: Tensor, heads: tuple[int, ...], head_dim: int) -> Tensor:
    """Forward hook: zeroes the output channels of `heads`."""
    keep = torch.ones(output.shape[-1] // head_dim, dtype=output.dtype, device=output.device)
    keep[list(heads)] = 0
    return output * keep.repeat_interleave(head_dim)


class HybridMixerMixin:
    """Put before a family's mixer class: `class HybridMixer(HybridMixerMixin, Mamba2Mixer)`.

    The mixer's own forward is called as it is; scans and kernels are untouched and parameter names stay.
    """

    def splice_attention(self, config: Any, layer_idx: int) -> None:
        """Called at the end of `__init__`: builds the branch that `config.splice` names for this layer, if any."""
        site = splice_sites(config.splice).get(layer_idx)
        self.attention = SplicedAttention(config, site, layer_idx) if site else None
        self.replaces = bool(site) and site["mode"] == "replace"
        if self.replaces:
            # After the gated norm: the other heads keep their scale, and the silenced columns of out_proj get no
            # gradient, whatever wraps or updates them.
            self.norm.register_forward_hook(partial(_silence, heads=tuple(site["heads"]), head_dim=self.head_dim))

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        splice_mask: Any = None,
        splice_rows: SpliceRows | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """(B,T,D) -> (B,T,D): `ssm(u) + attention(u)`."""
        training = self.training
        if self.replaces:
            # The fused training kernel reads out_proj.weight itself and would bring the silenced head back.
            self.training = False
        try:
            output = super().forward(hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs)
        finally:
            self.training = training
        if self.attention is None:
            return output
        return output + self.attention(hidden_states, cache_params, attention_mask, splice_mask, splice_rows)


class HybridInitMixin:
    """Put before a family's PreTrainedModel classes: initialises the branch where a checkpoint does not hold it."""

    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _keep_in_fp32_modules_strict = {"A_log", "dt_bias", "D"}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, SplicedAttention):
            module.initialize()
