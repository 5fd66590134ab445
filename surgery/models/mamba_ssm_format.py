"""Convert mamba_ssm's `config.json` and tensor names to transformers'.

Follows mamba_ssm 2.3 (`models/config_mamba.py`, `models/mixer_seq_simple.py`,
`modules/{mamba_simple,mamba2,mha,mlp}.py`). A missing key takes the default of that release. A value that transformers'
classes cannot express raises an error, since a guess would give a wrong model without one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transformers import Mamba2Config, MambaConfig, PreTrainedConfig

from surgery.errors import ModelError
from surgery.hybrid.modeling_mamba2attn import ATTENTION_DEFAULTS, Mamba2AttnConfig

# mamba_ssm's name: (transformers' name, mamba_ssm's default).
_MAMBA1: dict[str, tuple[str, Any]] = {
    "d_state": ("state_size", 16),
    "d_conv": ("conv_kernel", 4),
    "expand": ("expand", 2),
    "dt_rank": ("time_step_rank", "auto"),
    "dt_min": ("time_step_min", 0.001),
    "dt_max": ("time_step_max", 0.1),
    "dt_init": ("time_step_init_scheme", "random"),
    "dt_scale": ("time_step_scale", 1.0),
    "dt_init_floor": ("time_step_floor", 1e-4),
    "conv_bias": ("use_conv_bias", True),
    "bias": ("use_bias", False),
}
_MAMBA2: dict[str, tuple[str, Any]] = {
    "d_state": ("state_size", 128),
    "d_conv": ("conv_kernel", 4),
    "expand": ("expand", 2),
    "headdim": ("head_dim", 64),
    "ngroups": ("n_groups", 1),
    "dt_min": ("time_step_min", 0.001),
    "dt_max": ("time_step_max", 0.1),
    "dt_init_floor": ("time_step_floor", 1e-4),
    "dt_limit": ("time_step_limit", (0.0, math.inf)),
    "bias": ("use_bias", False),
    "conv_bias": ("use_conv_bias", True),
    "chunk_size": ("chunk_size", 256),
}
_TOP: dict[str, Any] = {
    "d_model": 2560,
    "d_intermediate": 0,
    "n_layer": 64,
    "vocab_size": 50277,
    "ssm_cfg": {},
    "attn_layer_idx": [],
    "attn_cfg": {},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 8,
    "tie_embeddings": True,
}
# Keys with one value that transformers' classes support, and the reason in the error for any other value.
_BUILT_IN: dict[str, tuple[Any, str]] = {
    "rmsnorm": (True, "transformers' Mamba-2 always has the gated norm after the scan"),
    "norm_before_gate": (False, "transformers' Mamba-2 always gates before its norm"),
    "D_has_hdim": (False, "transformers' Mamba-2 has one D per head"),
}
# Initial values and choices of kernels, which do not change what a trained checkpoint computes.
_WITHOUT_EFFECT = {
    "Mamba1": {"use_fast_path"},
    "Mamba2": {"conv_init", "A_init_range", "use_mem_eff_path", "process_group", "sequence_parallel"},
    "": {"model_type", "architectures", "torch_dtype", "dtype", "transformers_version", "_name_or_path",
         "_commit_hash"},
}  # fmt: skip
_MODEL_TYPES = ("mamba", "mamba2", "mamba_ssm")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

_RENAMED = {"backbone.embedding.weight": "backbone.embeddings.weight"}  # all other names are the same in both formats
TIED = ("backbone.embeddings.weight", "lm_head.weight")  # one tensor with `tie_embeddings`


def is_mamba_ssm(data: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is in mamba_ssm's format (`MambaConfig`), even with a model_type that was added."""
    other = data.get("model_type", "mamba2") not in _MODEL_TYPES or "hidden_size" in data
    return not other and ("ssm_cfg" in data or {"d_model", "n_layer"} <= data.keys())


def to_transformers(name: str) -> str:
    """Convert mamba_ssm's name of a tensor to transformers'."""
    return _RENAMED.get(name, name)


def is_derived(name: str) -> bool:
    """Whether a tensor follows from the config, such as the rotary frequencies in older files."""
    return name.endswith(".rotary_emb.inv_freq")


def convert_config(data: Mapping[str, Any]) -> PreTrainedConfig:
    """Convert a config to transformers': `MambaConfig`, `Mamba2Config`, or `Mamba2AttnConfig` of this toolkit.

    Args:
        data: content of mamba_ssm's config.json.

    Raises:
        ModelError: mamba_ssm has no such key, or none of these classes can express a value.
    """
    _refuse_unknown(data, {*_TOP, *_TOKENS, *_WITHOUT_EFFECT[""]}, "")
    top = {key: data.get(key, default) for key, default in _TOP.items()}
    for key in ("ssm_cfg", "attn_layer_idx", "attn_cfg"):
        top[key] = type(_TOP[key])() if top[key] is None else top[key]  # null is empty
        if type(top[key]) is not type(_TOP[key]):
            raise ModelError(key, top[key], f"It must be a {'list' if key == 'attn_layer_idx' else 'mapping'}.")
    for key in ("d_model", "n_layer", "vocab_size", "pad_vocab_size_multiple"):
        _positive(key, top[key])
    if not top["rms_norm"]:
        hint = "transformers' Mamba classes support RMSNorm only. Use a checkpoint with rms_norm true."
        raise ModelError("rms_norm", top["rms_norm"], hint)
    layer = top["ssm_cfg"].get("layer", "Mamba1")
    if layer not in ("Mamba1", "Mamba2"):
        hint = "Use Mamba1 or Mamba2."
        if layer == "Mamba3":
            hint = "Neither transformers nor this toolkit supports Mamba-3. Its config does not state the activation "
            hint += "of A, which mamba_ssm changed from softplus to a heavy-tailed one with the same tensors. "
            hint += "Use Mamba1 or Mamba2."
        raise ModelError("ssm_cfg.layer", layer, hint)
    multiple = top["pad_vocab_size_multiple"]
    fields: dict[str, Any] = {
        "vocab_size": -(-top["vocab_size"] // multiple) * multiple,
        "hidden_size": top["d_model"],
        "num_hidden_layers": top["n_layer"],
        "layer_norm_epsilon": 1e-5,
        "residual_in_fp32": top["residual_in_fp32"],
        "tie_word_embeddings": top["tie_embeddings"],
        **{key: data.get(key) for key in _TOKENS},  # not in the format: the tokenizer has them
    }
    has_more = bool(top["attn_layer_idx"] or top["d_intermediate"])
    if layer == "Mamba1":
        if has_more:
            key = "attn_layer_idx" if top["attn_layer_idx"] else "d_intermediate"
            raise ModelError(key, top[key], "Mamba-1 with attention layers or MLPs is not supported. Use Mamba2.")
        return MambaConfig(**fields, **_ssm_fields(top["ssm_cfg"], "Mamba1", _MAMBA1))
    fields |= _mamba2_fields(top)
    return Mamba2AttnConfig(**fields, **_attention_fields(top)) if has_more else Mamba2Config(**fields)


def _ssm_fields(ssm: Mapping[str, Any], layer: str, names: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """Return transformers' fields for the keys of `ssm_cfg`."""
    built_in = _BUILT_IN if layer == "Mamba2" else ()
    _refuse_unknown(ssm, {*names, *_WITHOUT_EFFECT[layer], "layer", *built_in}, "ssm_cfg.")
    expand = ssm.get("expand", 2)
    if expand != int(expand):
        raise ModelError("ssm_cfg.expand", expand, "It must be a whole number for transformers' classes.")
    fields = {ours: ssm.get(theirs, default) for theirs, (ours, default) in names.items()}
    return {**fields, "expand": int(expand)}


def _mamba2_fields(top: Mapping[str, Any]) -> dict[str, Any]:
    ssm = dict(top["ssm_cfg"])
    for key, (value, why) in _BUILT_IN.items():
        if ssm.get(key, value) != value:
            raise ModelError(f"ssm_cfg.{key}", ssm[key], f"{why[0].upper()}{why[1:]}.")
    width = ssm.pop("d_ssm", None)
    fields = _ssm_fields(ssm, "Mamba2", _MAMBA2)
    inner = fields["expand"] * top["d_model"]
    if width not in (None, inner):
        hint = f"transformers' Mamba-2 supports d_ssm {inner} only (all channels, no gated MLP)."
        raise ModelError("ssm_cfg.d_ssm", width, hint)
    for key in ("headdim", "ngroups"):
        _positive(f"ssm_cfg.{key}", fields[_MAMBA2[key][0]])
    if inner % fields["head_dim"]:
        raise ModelError("ssm_cfg.headdim", fields["head_dim"], f"It must divide the {inner} channels.")
    limit = tuple(float(x) for x in fields["time_step_limit"])
    return {**fields, "num_heads": inner // fields["head_dim"], "time_step_limit": limit}


def _attention_fields(top: Mapping[str, Any]) -> dict[str, Any]:
    """Return `attn_layer_idx`, `attn_cfg` with every key, and `d_intermediate`."""
    layers: Sequence[int] = top["attn_layer_idx"]
    attention: dict[str, Any] = dict(top["attn_cfg"])
    for layer in layers:
        if layer not in range(top["n_layer"]):
            hint = f"The model has layers 0 to {top['n_layer'] - 1}. Use one of them."
            raise ModelError("attn_layer_idx", layer, hint)
    if not layers:
        return {"d_intermediate": top["d_intermediate"]}
    _refuse_unknown(attention, {*ATTENTION_DEFAULTS, "num_heads", "causal", "mlp_dim"}, "attn_cfg.")
    if not attention.pop("causal", False):
        hint = "A language model needs causal attention. Set it to true; false is the default."
        raise ModelError("attn_cfg.causal", False, hint)
    if width := attention.pop("mlp_dim", 0):
        raise ModelError("attn_cfg.mlp_dim", width, "Attention with a parallel MLP is not supported. Set it to 0.")
    _positive("attn_cfg.num_heads", attention.get("num_heads"))
    fields = {**ATTENTION_DEFAULTS, **attention}
    shared = fields["num_heads_kv"] or fields["num_heads"]
    if fields["num_heads"] % shared:
        raise ModelError("attn_cfg.num_heads_kv", shared, f"It must divide the {fields['num_heads']} heads.")
    if fields["head_dim"] is None and top["d_model"] % fields["num_heads"]:
        raise ModelError("attn_cfg.num_heads", fields["num_heads"], f"It must divide d_model {top['d_model']}.")
    head_dim = fields["head_dim"] or top["d_model"] // fields["num_heads"]
    if fields["rotary_emb_dim"] % 2 or fields["rotary_emb_dim"] > head_dim:
        hint = f"It must be even, and at most the head's width {head_dim}."
        raise ModelError("attn_cfg.rotary_emb_dim", fields["rotary_emb_dim"], hint)
    return {"attn_layer_idx": sorted(layers), "attn_cfg": fields, "d_intermediate": top["d_intermediate"]}


def _refuse_unknown(data: Mapping[str, Any], known: Collection[str], prefix: str) -> None:
    for key, value in data.items():
        if key not in known:
            hint = "mamba_ssm's format has no such key. Remove it, or add a model_type if the config is transformers'."
            raise ModelError(prefix + key, value, hint)


def _positive(key: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise ModelError(key, value, "It must be a whole number above 0.")
