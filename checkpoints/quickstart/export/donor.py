"""Attention transplanted from a Transformer: single heads beside an SSM, or a whole layer instead of one.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only. It keeps the
donor's rotary positions with their scaling, its biases and its grouped keys and values. It has no convolution, no gate
and no norm, since the donor has none.

Shape legend: B batch, T new tokens, H query heads, G key/value heads, K head width, D model width.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

from .attention import SplicedAttention
from .backends import projected
from .packing import SplicePass
from .sites import FLAG, Check, at_least, register_branch, wrong

ROPE: Check = (
    lambda v: (
        isinstance(v, Mapping)
        and type(v.get("dim")) is int
        and v["dim"] > 0
        and v["dim"] % 2 == 0
        and type(v.get("max_position_embeddings")) is int
        and isinstance(v.get("parameters"), Mapping)
    ),
    "dim (an even number), parameters and max_position_embeddings",
)


@register_branch("teacher")
class DonorAttention(SplicedAttention):
    """Softmax attention as in Llama, Qwen2 and GPT-NeoX.

    Args:
        site: as of `SplicedAttention`, and `kv_heads` (of the whole branch), `bias` of query, key and value,
            `out_bias`, and `rope`: `dim`, the channels that turn, the donor's `parameters` and
            `max_position_embeddings`.
    """

    fields: Mapping[str, Check] = {
        "conv_kernel": at_least(0),
        "kv_heads": at_least(1),
        "out_bias": FLAG,
        "rope": ROPE,
    }
    unit_scale = False
    needs_teacher = True
    reads_positions = True

    @classmethod
    def check_site(cls, name: str, site: Mapping[str, Any]) -> None:
        """Check that the key/value heads divide the query heads."""
        if len(site["heads"]) % site["kv_heads"]:
            raise wrong(f"{name}.kv_heads", site["kv_heads"], f"a divisor of the {len(site['heads'])} heads")

    @classmethod
    def plan_fields(cls, source: Any) -> dict[str, Any]:
        """Return the shape of the donor's attention."""
        return source.donor_fields()

    def build_inputs(self, config: Any, site: Mapping[str, Any]) -> None:
        """Build the three projections and the rotary positions."""
        self.kv_heads, self.rope = site["kv_heads"], site["rope"]
        self.num_key_value_groups = self.num_heads // self.kv_heads
        widths = (self.num_heads * self.qk_width, self.kv_heads * self.qk_width, self.kv_heads * self.v_width)
        for name, width in zip(("q_proj", "k_proj", "v_proj"), widths, strict=True):
            self.add_module(name, nn.Linear(config.hidden_size, width, bias=site["bias"]))
        self.rotary = self._rotary()

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

    def initialize_inputs(self) -> None:
        """Draw weights with variance 1/fan-in; biases are 0."""
        for linear in (self.q_proj, self.k_proj, self.v_proj):
            init.normal_(linear.weight, std=linear.in_features**-0.5)
            if linear.bias is not None:
                init.zeros_(linear.bias)

    def fill(self, source: Any) -> None:
        """Copy the donor's weights. Its rotary frequencies are no weights: compute them on the branch's device."""
        self.rotary = self._rotary().to(self.scale.device)
        source.copy_donor(self)

    def project(
        self,
        u_BTD: Tensor,
        cache: Any,
        streams: Any,
        positions: Tensor | None,
        documents: Tensor | None = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project and rotate: (B,H,T,K), (B,G,T,K), (B,G,T,V), with the query scaled."""
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
        query, key = self._rotate(query, cos, sin), self._rotate(key, cos, sin)
        return query * self.scale[:, None, None], key, value

    def _rotate(self, x_BHTK: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> Tensor:
        """Rotate the first R channels of every head."""
        rotated, rest = x_BHTK.tensor_split([cos_BTR.shape[-1]], dim=-1)
        rotated = rotated * cos_BTR[:, None] + rotate_half(rotated) * sin_BTR[:, None]
        return torch.cat([rotated, rest], dim=-1)

    def put_out(self, mixed_BTHV: Tensor, u_BTD: Tensor, onto: Tensor | None = None) -> Tensor:
        """Project the heads' outputs: (B,T,H,V) -> (B,T,D), and add them to `onto` (B,T,D)."""
        return projected(self.o_proj, mixed_BTHV.flatten(2), onto)


class DonorMixer(nn.Module):
    """A Transformer layer's attention instead of an SSM mixer: no scan and no state, keys and values in the cache."""

    def __init__(self, config: Any, site: Mapping[str, Any], layer_idx: int) -> None:
        super().__init__()
        self.attention = DonorAttention(config, site, layer_idx)

    def forward(
        self,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        splice_pass: SplicePass | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """(B,T,D) -> (B,T,D)."""
        splice_pass = splice_pass or SplicePass()
        return self.attention(
            hidden_states,
            cache,
            attention_mask,
            splice_pass.causal,
            splice_pass.rows,
            positions=splice_pass.positions,
            documents=splice_pass.documents,
        )[0]
