"""Checks of a config.json before transformers builds anything from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from surgery.errors import ModelError

CONFIG_HINT = "Correct config.json, or download it again."
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
    """Refuse a config.json with impossible sizes, before a model is built from it.

    Args:
        data: content of the config.json.

    Raises:
        ModelError: it is no JSON object, a size is below 1 or above 2^31 - 1, or it has more than 256 layers.
    """
    if not isinstance(data, dict):
        raise ModelError("config.json", type(data).__name__, f"It is not a JSON object. {CONFIG_HINT}")
    for key, value in data.items():
        if isinstance(value, dict):
            check_sizes(value)
        if key in SIZES and isinstance(value, (int, float)) and not (type(value) is int and 1 <= value <= _LARGEST):
            raise ModelError(
                f"config.json: {key}", value, f"It must be a whole number from 1 to {_LARGEST}. {CONFIG_HINT}"
            )
        if key in _CHUNKS and value is None:
            raise ModelError(f"config.json: {key}", "null", f"It must be a whole number. {CONFIG_HINT}")
        layers = len(value) if key in _LAYER_LISTS and isinstance(value, list) else value if key in _LAYER_COUNTS else 0
        if isinstance(layers, int) and layers > _LAYERS:
            raise ModelError(f"config.json: {key}", layers, f"A model has at most {_LAYERS} layers. {CONFIG_HINT}")


def check_splice_version(data: Mapping[str, Any]) -> None:
    """Refuse a config.json whose field `splice` has another format. Raises ModelError."""
    version = data.get("splice_version", SPLICE_VERSION)  # exports of 0.1 have no version; it is 1
    if data.get("splice") and version != SPLICE_VERSION:
        hint = f"This release reads version {SPLICE_VERSION}. Install the release that wrote it."
        raise ModelError("config.json: splice_version", version, hint)


def check_unquantized(config: PreTrainedConfig) -> None:
    """Refuse a checkpoint whose weights are stored quantized.

    Locating reads columns of weights, a splice copies rows, and merging adapters changes them.

    Raises:
        ModelError: the config has a `quantization_config`.
    """
    packed = getattr(config, "quantization_config", None)
    if packed is not None:
        method = packed.get("quant_method") if isinstance(packed, Mapping) else packed.quant_method
        hint = "Its weights are stored quantized. Use the unquantized checkpoint. To train with a base in 4 bits, set "
        hint += "train.lora.quantization: nf4 and train.trainable: lora."
        raise ModelError("config.json: quantization_config", getattr(method, "value", method), hint)


def check_kernels(data: Mapping[str, Any]) -> None:
    """Raise ModelError if config.json names a kernel of the Hub, which transformers would download and run."""
    for key, value in data.items():
        names = value.values() if isinstance(value, dict) else [value]
        if "_implementation" in key and any(isinstance(name, str) and "/" in name for name in names):
            hint = "transformers would run this kernel. Remove the key, or set base.trust_remote_code to run it."
            raise ModelError(f"config.json: {key}", value, hint)
        if isinstance(value, dict):
            check_kernels(value)
