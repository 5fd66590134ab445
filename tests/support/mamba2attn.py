"""Small models with mamba_ssm's attention layers."""

from __future__ import annotations

from typing import Any

from tests.support.pico import pico_family

# Names of the cases: `attn_cfg` beside `num_heads`, and whether there are MLPs.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 0),
    "conv": ({"d_conv": 4}, 0),
    "shared keys": ({"num_heads_kv": 2, "head_dim": 12, "qkv_proj_bias": False, "out_proj_bias": False}, 0),
    "rotary": ({"head_dim": 16, "rotary_emb_dim": 8, "d_conv": 4, "num_heads_kv": 1}, 0),
    "interleaved": ({"rotary_emb_dim": 8, "rotary_emb_interleaved": True, "rotary_emb_base": 50.0}, 0),
    "mlp": ({"d_conv": 3, "rotary_emb_dim": 4, "softmax_scale": 0.5}, 40),
}


def attn_model(case: str = "rotary", **more: Any) -> Any:
    """4 layers: attention, Mamba-2, attention, Mamba-2."""
    own, width = CASES[case]
    attention = {"attn_layer_idx": [0, 2], "attn_cfg": {"num_heads": 4, **own}, "d_intermediate": width}
    return pico_family("mamba2attn", **{"n_groups": 2, **attention, **more})
