"""Attention that was a Transformer's: single heads beside an SSM, or a whole layer in the place of one.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only. The donor's
rotary positions with their scaling, its biases and its grouped keys and values are kept; there is no convolution, no
gate and no norm, since the donor had none.

Shape legend: B batch, T new tokens, H query heads, G key/value heads, K head width, D model width.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

from .attention import HybridMixerMixin, SplicedAttention, SplicePass


class DonorAttention(SplicedAttention):
    """Softmax attention as in Llama, Qwen2 and GPT-NeoX.

    Args:
        site: as of `SplicedAttention`, and `kv_heads` (of the whole branch), `bias` of query, key and value,
            `out_bias`, and `rope`: `dim`, the channels that turn, the donor's `parameters` and
            `max_position_embeddings`.
    """

    def _build_inputs(self, config: Any, site: Mapping[str, Any]) -> None:
        self.kv_heads, self.rope = site["kv_heads"], site["rope"]
        self.num_key_value_groups = self.num_heads // self.kv_heads
        widths = (self.num_heads * self.qk_width, self.kv_heads * self.qk_width, self.kv_heads * self.v_width)
        for name, width in zip(("q_proj", "k_proj", "v_proj"), widths, strict=True):
            self.add_module(name, nn.Linear(config.hidden_size, width, bias=site["bias"]))
        self.rotary = self._rotary()

    def _build_output(self, config: Any, site: Mapping[str, Any]) -> None:
        self.o_proj = nn.Linear(self.num_heads * self.v_width, config.hidden_size, bias=site["out_bias"])

    def _rotary(self) -> nn.Module:
        dim = self.rope["dim"]
        return LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=dim,
                num_attention_heads=1,
                head_dim=dim,
                rope_parameters=dict(self.rope["parameters"]),
                max_position_embeddings=self.rope["max_position_embeddings"],
            )
        )

    def _initialize_inputs(self) -> None:
        for linear in (self.q_proj, self.k_proj, self.v_proj):
            init.normal_(linear.weight, std=linear.in_features**-0.5)
            if linear.bias is not None:
                init.zeros_(linear.bias)

    def restore_rotary(self) -> None:
        """The frequencies are no weights: made again where the module was on no device."""
        self.rotary = self._rotary().to(self.scale.device)

    def _qkv(
        self, u_BTD: Tensor, cache: Any, streams: Any, positions: Tensor | None, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(B,H,T,K), (B,G,T,K), (B,G,T,V): queries and keys are turned, the query is scaled."""
        query, key, value = (
            linear(u_BTD).unflatten(-1, (heads, -1)).transpose(1, 2)
            for linear, heads in (
                (self.q_proj, self.num_heads),
                (self.k_proj, self.kv_heads),
                (self.v_proj, self.kv_heads),
            )
        )
        if positions is None:
            positions = torch.arange(u_BTD.shape[1], device=u_BTD.device)[None]
        cos, sin = self.rotary(query, positions)
        query, key = self._turn(query, cos, sin), self._turn(key, cos, sin)
        return query * self.scale[:, None, None], key, value

    def _turn(self, x_BHTK: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> Tensor:
        """Rotates the first R channels of every head."""
        turned, rest = x_BHTK.tensor_split([cos_BTR.shape[-1]], dim=-1)
        turned = turned * cos_BTR[:, None] + rotate_half(turned) * sin_BTR[:, None]
        return torch.cat([turned, rest], dim=-1)

    def _put_out(self, mixed_BTHV: Tensor, u_BTD: Tensor) -> Tensor:
        return self.o_proj(mixed_BTHV.flatten(2))


class DonorMixer(nn.Module):
    """A Transformer layer's attention where an SSM mixer was: no scan, no state; keys and values in the cache."""

    def __init__(self, config: Any, site: Mapping[str, Any], layer_idx: int) -> None:
        super().__init__()
        self.attention = DonorAttention(config, site, layer_idx)

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        splice_pass: SplicePass | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """(B,T,D) -> (B,T,D)."""
        given = splice_pass or SplicePass()
        return self.attention(
            hidden_states,
            cache_params,
            attention_mask,
            given.causal,
            given.rows,
            positions=given.positions,
            documents=given.documents,
        )[0]


# The branch that each `init` makes.
BRANCHES: Mapping[str, type[SplicedAttention]] = {**HybridMixerMixin.branches, "teacher": DonorAttention}
