"""The spliced attention head, and the mixin that adds it to an SSM mixer.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only. It must never
know how heads are found, planned or trained.

A hybrid mixer computes `ssm(u) + attention(u)`. The branch has softmax attention with no position code, a short causal
convolution and a gate like the SSM head whose place it takes (C is its query, B its key, x its value; arXiv
2405.21060), and an RMSNorm per head before its output projection. In Mamba-1 the branch reads B, C and x where the
mixer itself computes them: copies would be as large as the layer.

Shape legend: B batch, T new tokens, S tokens in the cache and new ones, H spliced heads of this layer, K query/key
width, V value width, D model width, Q rows asked for.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated
from transformers.utils.versions import require_version

from .packing import convolved

# Older releases decode layers that have a convolution state, a recurrent state and keys and values at once wrongly,
# without an error.
require_version("transformers>=5.21,<6", "This hybrid checkpoint needs it: pip install 'transformers>=5.21,<6'.")

CONV_STATE = 1  # the branch's own convolution state; state 0 is the SSM's


def splice_sites(splice: list | None) -> dict[int, dict[str, Any]]:
    """The config field `splice` by layer index."""
    return {site["layer"]: site for site in splice or []}


def is_whole(site: Mapping[str, Any]) -> bool:
    """Whether the branch takes the place of the layer's mixer."""
    return site.get("unit", "head") == "layer"


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
    """The reference: (B,H,T,K), (B,G,S,K), (B,G,S,V) -> (B,T,H,V) and the weights (B,H,T,S); G divides H."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2), weights


class SplicedAttention(nn.Module):
    """The attention heads that one layer received.

    Args:
        config: the hybrid's config; `hidden_size` and `_attn_implementation` are read.
        site: this layer's entry of `config.splice`: `heads`, `mode`, `init`, `qk_width`, `v_width`, `conv_kernel`,
            `activation` (`silu` or None), `gate`, `bias`, `conv_bias` and `norm_eps`; `gate_bias` where the gate has
            one of its own.
        layer_idx: index of the layer, which is also its slot in the cache.
    """

    is_causal = True
    num_key_value_groups = 1

    def __init__(self, config: Any, site: Mapping[str, Any], layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.num_heads, self.qk_width, self.v_width = len(site["heads"]), site["qk_width"], site["v_width"]
        self.conv_kernel, self.mode, self.silu = site["conv_kernel"], site["mode"], site["activation"] == "silu"
        self.norm_eps = site["norm_eps"]
        # Copies of an SSM head start as the linear attention that they are copied from, which has no scale.
        self.initial_scale = 1.0 if site["init"] == "ssm" else self.qk_width**-0.5
        self.widths = [self.num_heads * w for w in (self.qk_width, self.qk_width, self.v_width)]
        self._build_inputs(config, site)
        gate_bias = site.get("gate_bias", site["bias"])
        self.gate_proj = nn.Linear(config.hidden_size, self.widths[2], bias=gate_bias) if site["gate"] else None
        self.scale = nn.Parameter(torch.full((self.num_heads,), self.initial_scale))
        self._build_output(config, site)

    def _build_output(self, config: Any, site: Mapping[str, Any]) -> None:
        self.o_proj = nn.Linear(self.widths[2], config.hidden_size, bias=False)

    def _build_inputs(self, config: Any, site: Mapping[str, Any]) -> None:
        channels = sum(self.widths)
        self.qkv_proj = nn.Linear(config.hidden_size, channels, bias=site["bias"])
        self.conv1d = nn.Conv1d(channels, channels, self.conv_kernel, groups=channels, bias=site["conv_bias"])

    def initialize(self) -> None:
        """Initial values where a checkpoint has none; in `add` mode the branch is silent until it is trained."""
        init.constant_(self.scale, self.initial_scale)
        self._initialize_inputs()
        if self.mode == "add":
            init.zeros_(self.o_proj.weight)

    def _initialize_inputs(self) -> None:
        init.kaiming_uniform_(self.conv1d.weight, a=math.sqrt(5))

    def forward(
        self,
        u_BTD: Tensor,
        cache: Any = None,
        padding_mask: Tensor | None = None,
        causal_mask: Any = None,
        rows: "SpliceRows | None" = None,
        streams: tuple[Tensor, Tensor] | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(B,T,D) -> (B,T,D), and the weights (B,H,T,S) where the implementation in use gives them.

        Args:
            cache: a transformers Cache whose layer `layer_idx` is of type `hybrid`; updated in place.
            padding_mask: (B,T), 0 on padding; None when there is none.
            causal_mask: as made by transformers' `create_causal_mask` for the implementation in use.
            rows: collects attention rows that the caller asked for.
            streams: what the mixer's `x_proj` took and gave, for a branch that reads there.
            positions: (B or 1,T) of the new tokens, for a branch that has a position code.
            documents: (B,T) which of a row's documents each token belongs to; None where a row holds one.
        """
        if padding_mask is not None:
            u_BTD = u_BTD * padding_mask[:, :, None].to(u_BTD.dtype)
        query, key, value = self._qkv(u_BTD, cache, streams, positions, documents)
        if rows is not None:
            whole_key = key.repeat_interleave(self.num_key_value_groups, dim=1)
            rows.collect(self.layer_idx, query, whole_key, padding_mask, documents)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        implementation = self.config._attn_implementation
        if "flash" in implementation or (implementation == "sdpa" and query.shape[2] > 1):
            query, key, value = self._widened(query, key, value)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        mixed_BTHV, weights = attend(self, query, key, value, causal_mask, scaling=1.0, dropout=0.0)
        return self._put_out(mixed_BTHV[..., : self.v_width], u_BTD), weights

    def _widened(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of one width, as fused kernels want it. Zeros change no score; the output is cropped."""
        width = max(self.qk_width, self.v_width)
        query, key = (F.pad(x, (0, width - self.qk_width)) for x in (query, key))
        return query, key, F.pad(value, (0, width - self.v_width))

    def _put_out(self, mixed_BTHV: Tensor, u_BTD: Tensor) -> Tensor:
        if self.gate_proj is not None:
            gate = self.gate_proj(u_BTD).view(mixed_BTHV.shape)
            mixed_BTHV = mixed_BTHV * F.silu(gate)
        return self.o_proj(self._rms_norm(mixed_BTHV).flatten(2))

    def _qkv(
        self, u_BTD: Tensor, cache: Any, streams: Any, positions: Tensor | None, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Projections, short causal convolution, activation; the query is scaled. Each (B,H,T,width)."""
        x_BCT = self.qkv_proj(u_BTD).transpose(1, 2)
        T = x_BCT.shape[-1]
        if cache is not None:
            x_BCT = cache.update_conv_state(
                x_BCT, self.layer_idx, state_idx=CONV_STATE, conv_kernel_size=self.conv_kernel
            )
        x_BCT = convolved(self.conv1d, self.conv_kernel, x_BCT, T, documents)
        # Contiguous channels: SDPA's fused kernels refuse a head whose last dimension has a stride.
        x_BTC = (F.silu(x_BCT) if self.silu else x_BCT).transpose(1, 2).contiguous()
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in x_BTC.split(self.widths, dim=-1)
        )
        return query * self.scale[:, None, None], key, value

    def _rms_norm(self, x_BTHV: Tensor) -> Tensor:
        """RMSNorm of every head by itself, in fp32, without a weight: `o_proj` can hold it."""
        x = x_BTHV.float()
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.norm_eps)).to(x_BTHV.dtype)


class StreamAttention(SplicedAttention):
    """Attention heads of a Mamba-1 layer: they read the mixer's own streams, after its convolution and `x_proj`.

    Mamba-1 makes one B and one C a layer from all its channels, so copies of their rows would be the whole layer. The
    branch has a small linear map of its own over `[dt | B | C]`; at first it picks C as query and B as key. Its value
    is the channel group's x.

    Args:
        site: also `rank`, the width of dt, and `stream_eps`, the epsilon where the model normalises dt, B and C, or
            None; `heads` are channel groups of `v_width`.
    """

    def _build_inputs(self, config: Any, site: Mapping[str, Any]) -> None:
        self.heads, self.stream_eps = list(site["heads"]), site["stream_eps"]
        self.stream_widths = [site["rank"], site["qk_width"], site["qk_width"]]
        self.qk_proj = nn.Linear(sum(self.stream_widths), 2 * self.widths[0], bias=False)

    def _initialize_inputs(self) -> None:
        init.zeros_(self.qk_proj.weight)
        rank, width, _ = self.stream_widths
        query_HKW, key_HKW = self.qk_proj.weight.view(2, self.num_heads, width, -1)
        init.copy_(query_HKW[..., rank + width :], torch.eye(width).expand(self.num_heads, -1, -1))
        init.copy_(key_HKW[..., rank : rank + width], torch.eye(width).expand(self.num_heads, -1, -1))

    def _qkv(
        self, u_BTD: Tensor, cache: Any, streams: Any, positions: Tensor | None, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert streams is not None, "the mixer did not call x_proj"
        x_BTI, parameters_BTW = streams
        if self.stream_eps is not None:
            parts = parameters_BTW.float().split(self.stream_widths, dim=-1)
            normed = [p * torch.rsqrt(p.pow(2).mean(-1, keepdim=True) + self.stream_eps) for p in parts]
            parameters_BTW = torch.cat(normed, dim=-1).to(parameters_BTW.dtype)
        qk_BTRHK = self.qk_proj(parameters_BTW).unflatten(-1, (2, self.num_heads, -1))
        query, key = qk_BTRHK.permute(2, 0, 3, 1, 4)
        value = x_BTI.unflatten(-1, (-1, self.v_width))[:, :, self.heads].transpose(1, 2)
        return query * self.scale[:, None, None], key, value


@dataclass
class SplicePass:
    """What one forward pass hands to its spliced layers.

    Attributes:
        padding: (B,T) of the new tokens, 0 on padding; None where there is none.
        causal: the mask of transformers' `create_causal_mask`.
        rows: collects attention rows, or None.
        positions: (B or 1,T) of the new tokens.
        documents: (B,T) which of a row's documents each token belongs to; None where a row holds one.
    """

    padding: Tensor | None = None
    causal: Any = None
    rows: "SpliceRows | None" = None
    positions: Tensor | None = None
    documents: Tensor | None = None


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

    def collect(self, layer: int, query_BHTK: Tensor, key_BHTK: Tensor, padding: Any, documents: Any = None) -> None:
        """Computes softmax rows (B,H,Q,T) in fp32 for this layer."""
        index_BQ = self.queries_BQ.clamp(min=0)
        rows_BHQK = query_BHTK.gather(
            2, index_BQ[:, None, :, None].expand(-1, query_BHTK.shape[1], -1, query_BHTK.shape[3])
        )
        scores = rows_BHQK.float() @ key_BHTK.float().transpose(2, 3)
        seen_BQT = torch.arange(key_BHTK.shape[2], device=scores.device) <= index_BQ[..., None]
        if padding is not None:
            seen_BQT = seen_BQT & padding[:, None, :].bool()
        if documents is not None:
            seen_BQT = seen_BQT & (documents.gather(1, index_BQ)[..., None] == documents[:, None, :])
        scores = scores.masked_fill(~seen_BQT[:, None], torch.finfo(scores.dtype).min)
        asked = (self.queries_BQ >= 0)[:, None, :, None]
        rows_BHQT = torch.where(asked, scores.softmax(-1), 0.0)
        if self._rows is not None:
            self._rows[layer] = rows_BHQT

    def take(self) -> tuple[Tensor, ...]:
        """The rows by layer, from below; closes the collection."""
        rows, self._rows = self._rows or {}, None
        return tuple(rows[layer] for layer in sorted(rows))


class _Watched:
    """A projection of a mixer while the mixer runs: heads are silenced in its input, or its input and output are kept.

    It stands for whatever module is there at the call, so that adapters and quantisers may put theirs in its place.

    Args:
        silenced: heads and their width, or None.
        seen: collects each input with its output, or None.
    """

    def __init__(self, module: nn.Module, silenced: tuple[list[int], int] | None = None, seen: Any = None) -> None:
        self.module, self.silenced, self.seen = module, silenced, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def __call__(self, x_BTI: Tensor) -> Tensor:
        if self.silenced is not None:
            heads, width = self.silenced
            keep_H = torch.ones(x_BTI.shape[-1] // width, dtype=x_BTI.dtype, device=x_BTI.device)
            keep_H[heads] = 0
            x_BTI = x_BTI * keep_H.repeat_interleave(width)
        output = self.module(x_BTI)
        if self.seen is not None:
            self.seen.append((x_BTI, output))
        return output


class HybridMixerMixin:
    """Put before a family's mixer class: `class HybridMixer(HybridMixerMixin, Mamba2Mixer)`.

    The mixer's own forward is called as it is; scans and kernels are untouched and parameter names stay.
    """

    branches: Mapping[str, type[SplicedAttention]] = {"ssm": SplicedAttention, "random": SplicedAttention}
    # Set where the family's scan takes no initial state: several new tokens after a cache go one by one.
    one_by_one = False
    # Set where the family's gated norm takes one mean square over all groups before transformers 5.23.
    norm_by_group = False

    @classmethod
    def take_over(cls, mixer: nn.Module, config: Any) -> None:
        """Makes a mixer that the family built one of this class, so that none is built twice."""
        mixer.__class__ = cls
        if cls.norm_by_group:
            width = mixer.intermediate_size
            mixer.norm = Zamba2RMSNormGated(width, width // mixer.n_groups, eps=mixer.norm.variance_epsilon)
        mixer.splice_attention(config, mixer.layer_idx)

    def splice_attention(self, config: Any, layer_idx: int) -> None:
        """Builds the branch that `config.splice` names for this layer, if any."""
        site = splice_sites(config.splice).get(layer_idx)
        self.attention = self.branches[site["init"]](config, site, layer_idx) if site else None
        self.silenced = (list(site["heads"]), site["head_dim"]) if site and site["mode"] == "replace" else None
        self.seen: list[tuple[Tensor, Tensor]] | None = None  # a list while the mixer runs
        # The fused training kernels read the weights of out_proj and x_proj themselves: they would bring a silenced
        # head back, and pass the branch by.
        self.unfused = self.silenced is not None or isinstance(self.attention, StreamAttention)

    @property
    def out_proj(self) -> Any:
        """The output projection. A replaced head's channels reach nothing that stands there, also with an adapter."""
        module = nn.Module.__getattr__(self, "out_proj")
        return module if self.seen is None or self.silenced is None else _Watched(module, self.silenced)

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Any = None,
        attention_mask: Any = None,
        splice_pass: SplicePass | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """(B,T,D) -> (B,T,D): `ssm(u) + attention(u)`."""
        if isinstance(attention_mask, SplicePass):  # Mamba-1's model hands nothing else down
            splice_pass, attention_mask = attention_mask, attention_mask.padding
        if self.attention is None:
            return self._scan(hidden_states, cache_params, attention_mask, **kwargs)
        splice_pass = splice_pass or SplicePass(attention_mask)
        training, seen = self.training, []
        self.training, self.seen = training and not self.unfused, seen
        try:
            output = self._scan(hidden_states, cache_params, attention_mask, **kwargs)
        finally:
            self.training, self.seen = training, None
        streams = tuple(torch.cat(parts, dim=1) for parts in zip(*seen, strict=True)) or None
        return (
            output
            + self.attention(
                hidden_states,
                cache_params,
                attention_mask,
                splice_pass.causal,
                splice_pass.rows,
                streams,
                splice_pass.positions,
                splice_pass.documents,
            )[0]
        )

    def _scan(self, hidden_states: Tensor, cache: Any, padding: Tensor | None, **kwargs: Any) -> Tensor:
        """The family's own forward."""
        T = hidden_states.shape[1]
        # State 0 is the scan's; the cache has a second one, which not every branch fills.
        goes_on = cache is not None and cache.has_previous_state(self.layer_idx, state_idx=0)
        if not (self.one_by_one and T > 1 and goes_on):
            return super().forward(hidden_states, cache_params=cache, attention_mask=padding, **kwargs)
        steps = [
            super(HybridMixerMixin, self).forward(
                hidden_states[:, t : t + 1],
                cache_params=cache,
                attention_mask=None if padding is None else padding[:, t : t + 1],
                **kwargs,
            )
            for t in range(T)
        ]
        return torch.cat(steps, dim=1)


class StreamMixerMixin(HybridMixerMixin):
    """Put before Mamba-1's mixers, whose branches may read what `x_proj` takes and gives."""

    one_by_one = True

    @property
    def x_proj(self) -> Any:
        """The projection to dt, B and C; what it takes and gives is kept while the mixer runs."""
        module = nn.Module.__getattr__(self, "x_proj")
        return module if self.seen is None else _Watched(module, seen=self.seen)


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
