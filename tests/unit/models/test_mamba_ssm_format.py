"""mamba_ssm's format: its config in all variants, names both ways, and what is refused, by name."""

from __future__ import annotations

import math
from typing import Any

from transformers import Mamba2Config, MambaConfig

from surgery.errors import ModelError
from surgery.hybrid.modeling_mamba2attn import Mamba2AttnConfig
from surgery.models import mamba_ssm_format
from tests.support.cases import each
from tests.support.errors import refused

# As published with the models of these names.
MAMBA_130M = {
    "d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {}, "rms_norm": True, "residual_in_fp32": True,
    "fused_add_norm": True, "pad_vocab_size_multiple": 8,
}  # fmt: skip
MAMBA2_130M = {
    **MAMBA_130M, "d_intermediate": 0, "ssm_cfg": {"layer": "Mamba2"}, "attn_layer_idx": [], "attn_cfg": {},
    "pad_vocab_size_multiple": 16, "tie_embeddings": True,
}  # fmt: skip
ATTENTION = {
    "causal": True, "d_conv": 4, "head_dim": 128, "num_heads": 30, "out_proj_bias": False, "qkv_proj_bias": False,
    "rotary_emb_dim": 64,
}  # fmt: skip
MAMBA2ATTN_27B = {
    **MAMBA2_130M, "d_model": 2560, "n_layer": 64, "attn_layer_idx": [9, 18, 27, 36, 45, 56], "attn_cfg": ATTENTION,
}  # fmt: skip


def assert_refused(data: dict[str, Any], field: str, value: Any, *words: str) -> None:
    with refused(ModelError, f"{field}: {value}. ", *words):
        mamba_ssm_format.convert_config(data)


@each("data", [{}, {"model_type": "mamba2"}, {"model_type": "llamba", "d_model": 8, "n_layer": 2, "ssm_cfg": {}}])
def test_others_are_not(data: dict[str, Any]) -> None:
    assert not mamba_ssm_format.is_mamba_ssm(data)


def test_a_missing_layer_means_mamba1() -> None:
    config = mamba_ssm_format.convert_config(MAMBA_130M)
    assert type(config) is MambaConfig
    assert (config.state_size, config.conv_kernel, config.expand, config.time_step_rank) == (16, 4, 2, 48)
    assert config.vocab_size == 50280


def test_mamba2_defaults_are_mamba_ssms() -> None:
    config = mamba_ssm_format.convert_config(MAMBA2_130M)
    assert type(config) is Mamba2Config
    assert (config.num_heads, config.head_dim, config.state_size, config.n_groups) == (24, 64, 128, 1)
    assert (config.chunk_size, config.layer_norm_epsilon, config.vocab_size) == (256, 1e-5, 50288)
    assert tuple(config.time_step_limit) == (0.0, math.inf)
    assert (config.tie_word_embeddings, config.residual_in_fp32, config.use_bias) == (True, True, False)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, None)


def test_attention_layers_are_kept() -> None:
    config = mamba_ssm_format.convert_config(MAMBA2ATTN_27B)
    assert type(config) is Mamba2AttnConfig
    assert [i for i, kind in enumerate(config.layer_types) if kind == "hybrid"] == [9, 18, 27, 36, 45, 56]
    assert ATTENTION.items() - {("causal", True)} <= config.attn_cfg.items()


def test_null_means_empty_and_initial_values_do_not_matter() -> None:
    data = {**MAMBA2_130M, "attn_layer_idx": None, "attn_cfg": None}
    ssm = {"layer": "Mamba2", "A_init_range": [1, 16], "conv_init": None, "use_mem_eff_path": True, "d_ssm": 1536}
    assert (
        mamba_ssm_format.convert_config({**data, "ssm_cfg": ssm}).to_dict()
        == mamba_ssm_format.convert_config(MAMBA2_130M).to_dict()
    )


def test_every_key_that_has_a_place_arrives() -> None:
    ssm = {"layer": "Mamba2", "d_state": 8, "d_conv": 3, "expand": 4, "headdim": 32, "ngroups": 2, "bias": True}
    ssm |= {"conv_bias": False, "chunk_size": 64, "dt_limit": [0.1, 2.0], "dt_min": 0.01, "dt_max": 0.2}
    more = {"residual_in_fp32": False, "tie_embeddings": False, "eos_token_id": 0}
    config = mamba_ssm_format.convert_config({**MAMBA2_130M, "ssm_cfg": ssm, **more})
    found = (config.state_size, config.conv_kernel, config.expand, config.head_dim, config.n_groups, config.num_heads)
    assert found == (8, 3, 4, 32, 2, 96)
    assert (config.use_bias, config.use_conv_bias, config.chunk_size) == (True, False, 64)
    assert (tuple(config.time_step_limit), config.time_step_min, config.time_step_max) == ((0.1, 2.0), 0.01, 0.2)
    assert (config.residual_in_fp32, config.tie_word_embeddings, config.eos_token_id) == (False, False, 0)
    mamba1 = mamba_ssm_format.convert_config({**MAMBA_130M, "ssm_cfg": {"dt_rank": 7, "d_state": 4, "dt_scale": 2.0}})
    assert (mamba1.time_step_rank, mamba1.state_size, mamba1.time_step_scale) == (7, 4, 2.0)


def attention(**change: Any) -> dict[str, Any]:
    return {**MAMBA2ATTN_27B, "attn_cfg": {**ATTENTION, **change}}


@each(
    ("change", "field", "value", "word"),
    [
        ({"rms_norm": False}, "rms_norm", False, "RMSNorm"),
        ({"norm_epsilon": 1e-6}, "norm_epsilon", 1e-6, "no such key"),
        ({"d_model": "768"}, "d_model", "768", "whole number"),
        ({"ssm_cfg": {"layer": "Mamba4"}}, "ssm_cfg.layer", "Mamba4", "Mamba1 or Mamba2"),
        ({"ssm_cfg": {"layer": "Mamba2", "rmsnorm": False}}, "ssm_cfg.rmsnorm", False, "gated norm"),
        ({"ssm_cfg": {"layer": "Mamba2", "norm_before_gate": True}}, "ssm_cfg.norm_before_gate", True, "gates"),
        ({"ssm_cfg": {"layer": "Mamba2", "D_has_hdim": True}}, "ssm_cfg.D_has_hdim", True, "one D per head"),
        ({"ssm_cfg": {"layer": "Mamba2", "d_ssm": 1024}}, "ssm_cfg.d_ssm", 1024, "1536"),
        ({"ssm_cfg": {"layer": "Mamba2", "expand": 1.5}}, "ssm_cfg.expand", 1.5, "whole"),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": 100}}, "ssm_cfg.headdim", 100, "1536"),
        ({"ssm_cfg": {"headdim": 64}}, "ssm_cfg.headdim", 64, "no such key"),
        ({"ssm_cfg": {}, "attn_layer_idx": [1]}, "attn_layer_idx", [1], "Mamba-1"),
        ({"ssm_cfg": {}, "d_intermediate": 64}, "d_intermediate", 64, "Mamba-1"),
        (attention(causal=False), "attn_cfg.causal", False, "causal"),
        (attention(mlp_dim=256), "attn_cfg.mlp_dim", 256, "not supported"),
        (attention(num_heads_kv=7), "attn_cfg.num_heads_kv", 7, "30 heads"),
        (attention(rotary_emb_dim=256), "attn_cfg.rotary_emb_dim", 256, "128"),
        (attention(num_heads=0), "attn_cfg.num_heads", 0, "whole number"),
        (attention(window=128), "attn_cfg.window", 128, "no such key"),
        ({**MAMBA2ATTN_27B, "attn_layer_idx": [9, 64]}, "attn_layer_idx", 64, "0 to 63"),
    ],
)
def test_what_cannot_be_expressed_is_refused(change: dict[str, Any], field: str, value: Any, word: str) -> None:
    assert_refused({**MAMBA2_130M, **change}, field, value, word)


def test_mamba3_is_recognised_and_honestly_refused() -> None:
    data = {**MAMBA2_130M, "ssm_cfg": {"layer": "Mamba3", "is_mimo": True}}
    assert mamba_ssm_format.is_mamba_ssm(data)
    missing = ("Neither transformers nor this toolkit", "softplus", "heavy-tailed", "does not state the activation")
    assert_refused(data, "ssm_cfg.layer", "Mamba3", *missing)
