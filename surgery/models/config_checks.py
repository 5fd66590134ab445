"""Checks of a config.json before transformers builds anything from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.configuration_utils import remap_legacy_layer_types

from surgery.errors import ModelError

CONFIG_HINT = "Correct config.json."
SPLICE_VERSION = 1  # format of the config field `splice`; exports name it in `splice_version`
_LARGEST, _LAYERS = 2**31 - 1, 256
_CHUNKS = ("chunk_size", "mamba_chunk_size")
_LAYER_COUNTS, _LAYER_LISTS = ("num_hidden_layers", "n_layer"), ("layers_block_type", "layer_types")
# Keys of config.json whose numbers are sizes, in all families.
SIZES = frozenset((
    *_CHUNKS, *_LAYER_COUNTS, "adapter_rank", "attention_head_dim", "attention_hidden_size", "base_state_size",
    "conv_kernel", "d_conv", "d_model", "d_state", "expand", "head_dim", "headdim", "hidden_size",
    "intermediate_size", "mamba_d_conv", "mamba_d_head", "mamba_d_ssm", "mamba_d_state", "mamba_expand",
    "mamba_head_dim", "mamba_headdim", "mamba_n_groups", "mamba_n_heads", "mamba_ngroups", "mamba_num_heads",
    "max_position_embeddings", "n_groups", "n_mamba_heads", "n_qk_heads", "n_v_heads", "ngroups",
    "num_attention_heads", "num_heads", "num_heads_kv", "num_key_value_heads", "num_mem_blocks", "ssm_state_size",
    "state_size", "time_step_rank", "vocab_size",
))  # fmt: skip


def check_sizes(data: Any) -> None:
    """Raise ModelError if a config.json is no JSON object, or has a size outside 1 to 2^31 - 1 or over 256 layers."""
    if not isinstance(data, dict):
        raise ModelError("config.json", type(data).__name__, f"It is not a JSON object. {CONFIG_HINT}")
    for key, value in data.items():
        if isinstance(value, dict):
            check_sizes(value)
        if key in SIZES and isinstance(value, (int, float)) and not (type(value) is int and 1 <= value <= _LARGEST):
            hint = f"It must be a whole number from 1 to {_LARGEST}. {CONFIG_HINT}"
            raise ModelError(f"config.json: {key}", value, hint)
        if key in _CHUNKS and value is None:
            raise ModelError(f"config.json: {key}", "null", f"It must be a whole number. {CONFIG_HINT}")
        layers = len(value) if key in _LAYER_LISTS and isinstance(value, list) else value if key in _LAYER_COUNTS else 0
        if isinstance(layers, int) and layers > _LAYERS:
            raise ModelError(f"config.json: {key}", layers, f"A model has at most {_LAYERS} layers. {CONFIG_HINT}")


# Letters of Nemotron-H's patterns, of which a config has one or the list.
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_PATTERNS = ("hybrid_override_pattern", "mtp_hybrid_override_pattern")
_ATTENDING = {"attn_layer_indices": "full_attention", "hybrid_layer_ids": "hybrid"}
STEP_MIN = 1e-30  # as a lower limit of dt: none. The initialisation of the classes that read it takes the logarithm


def check_patterns(data: Mapping[str, Any]) -> None:
    """Raise ModelError if a pattern has a letter that transformers does not know."""
    for key in _PATTERNS:
        unknown = sorted(set(str(data.get(key) or "")) - _LETTERS.keys())
        if unknown:
            known = ", ".join(f"{letter} ({kind})" for letter, kind in _LETTERS.items())
            hint = f"transformers does not know {unknown[0]!r}, only {known}. Correct it, or update transformers."
            raise ModelError(f"config.json: {key}", data[key], hint)


def check_layers(data: Mapping[str, Any], config: PreTrainedConfig) -> None:
    """Raise ModelError if a config.json states the kinds of its layers twice and differently.

    Its class reads one of them only, so it would compute another model. `config` was made from `data`.
    """
    read = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None)
    if read is None:
        return
    for key in ("num_hidden_layers", _PATTERNS[0], "layers_block_type", "layer_types", *_ATTENDING):
        said = data.get(key)
        if said is None or (key == "layer_types" and data.get("splice")):  # there, the kinds of caches of a hybrid
            continue
        found: Any = list(read)
        if key == "num_hidden_layers":
            found = len(read)
        elif key in _ATTENDING:
            said, found = sorted(said), [layer for layer, kind in enumerate(read) if kind == _ATTENDING[key]]
        else:
            said = [_LETTERS[x] for x in said] if key in _PATTERNS else remap_legacy_layer_types(said)
        if said != found:
            hint = f"Its class reads other layers: {found}. Correct the keys of config.json that state layers."
            raise ModelError(f"config.json: {key}", data[key], hint)


def published_limits(config: PreTrainedConfig, lower_limit: str) -> dict[str, Any]:
    """Return the fields to change so that the class limits dt as the published model does.

    Published models clamp dt to `time_step_limit`. Some classes of transformers ignore it, and clamp to another field
    from below (`Family.lower_limit`), so that field takes the limit.

    Raises:
        ModelError: the class cannot have this limit.
    """
    if not hasattr(config, "time_step_limit"):
        return {}
    limit = (0.0, math.inf) if config.time_step_limit is None else tuple(map(float, config.time_step_limit))
    if not (len(limit) == 2 and 0 <= limit[0] < limit[1]):
        hint = "It must be two numbers, the first at least 0 and below the second."
        raise ModelError("config.json: time_step_limit", config.time_step_limit, hint)
    if not lower_limit:
        return {"time_step_limit": limit} if config.time_step_limit is None else {}
    if limit[1] != math.inf:
        hint = f"transformers' {config.model_type} has no upper limit of dt, so it would compute another model."
        raise ModelError("config.json: time_step_limit", limit, hint)
    lowest = max(limit[0], STEP_MIN)
    return {} if getattr(config, lower_limit) == lowest else {lower_limit: lowest}


def check_splice_version(data: Mapping[str, Any]) -> None:
    """Raise ModelError if the field `splice` of a config.json has another format."""
    version = data.get("splice_version", SPLICE_VERSION)
    if data.get("splice") and version != SPLICE_VERSION:
        hint = f"This release reads version {SPLICE_VERSION}. Install the release that wrote it."
        raise ModelError("config.json: splice_version", version, hint)


def quantization_of(config: PreTrainedConfig) -> str:
    """Return the method that the weights of a checkpoint are quantized with, according to its config, or nothing."""
    packed = getattr(config, "quantization_config", None)
    if packed is None:
        return ""
    method = packed.get("quant_method") if isinstance(packed, Mapping) else packed.quant_method
    return str(getattr(method, "value", method))


def check_unquantized(config: PreTrainedConfig) -> None:
    """Refuse a checkpoint whose weights are stored quantized.

    Locating reads columns of weights, a splice copies rows, and merging adapters changes them. Raises ModelError.
    """
    method = quantization_of(config)
    if method:
        hint = "Its weights are stored quantized. Use the unquantized checkpoint. To train with a base in 4 bits, set "
        hint += "train.lora.quantization: nf4 and train.trainable: lora."
        raise ModelError("config.json: quantization_config", method, hint)


def check_kernels(data: Mapping[str, Any]) -> None:
    """Raise ModelError if config.json names a kernel of the Hub, which transformers would download and run."""
    for key, value in data.items():
        names = value.values() if isinstance(value, dict) else [value]
        if "_implementation" in key and any(isinstance(name, str) and "/" in name for name in names):
            hint = "transformers would run this kernel. Remove the key, or set base.trust_remote_code to run it."
            raise ModelError(f"config.json: {key}", value, hint)
        if isinstance(value, dict):
            check_kernels(value)
