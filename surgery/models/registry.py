"""Where the mixers of each model type sit. Owns: the table of families.

Layouts are read from configs alone; module paths are those of transformers' causal language models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import PreTrainedConfig

from surgery import hybrid as h
from surgery.hybrid.sites import is_whole
from surgery.models.layouts import Family
from surgery.types import Letter, MixerSpec

CHANNELS_PER_HEAD = 64  # Mamba-1 has channels only; `base.channels_per_head` says how many make a head


def _mamba2(config: PreTrainedConfig) -> list[MixerSpec]:
    """`mamba2`: every layer is one mixer, or an attention layer of mamba_ssm's."""
    attention = set(getattr(config, "attn_layer_idx", None) or [])
    found = []
    for layer in range(config.num_hidden_layers):
        path = f"backbone.layers.{layer}.mixer"
        if layer in attention:
            found.append(_mamba_ssm_attention(config, layer, path))
            continue
        shape = (config.num_heads, config.head_dim, config.n_groups, config.state_size)
        found.append(MixerSpec(layer, path, "mamba2", *shape, conv_kernel=config.conv_kernel))
    return found


def _mamba_ssm_attention(config: PreTrainedConfig, layer: int, path: str) -> MixerSpec:
    fields = config.attn_cfg
    heads = fields["num_heads"]
    width = fields.get("head_dim") or config.hidden_size // heads
    groups = fields.get("num_heads_kv") or heads
    kernel = fields.get("d_conv") or 0
    return MixerSpec(layer, path, "mamba_ssm_attention", heads, width, groups, width, letter="A", conv_kernel=kernel)


def _mamba1(kind: str, config: PreTrainedConfig) -> list[MixerSpec]:
    width = getattr(config, "channels_per_head", None) or CHANNELS_PER_HEAD
    width = min(width, config.intermediate_size)
    heads = config.intermediate_size // width
    return [
        MixerSpec(
            layer,
            f"backbone.layers.{layer}.mixer",
            kind,
            heads,
            width,
            num_groups=1,
            state_size=config.state_size,
            native_heads=width == 1,
            conv_kernel=config.conv_kernel,
        )
        for layer in range(config.num_hidden_layers)
    ]


def _llamba(config: PreTrainedConfig) -> list[MixerSpec]:
    """Layers that a teacher's attention took the place of are attention now."""
    whole = {site["layer"]: site for site in config.splice or [] if is_whole(site)}
    shape = (config.num_heads, config.head_dim, config.n_groups, config.state_size)
    found = []
    for layer in range(config.num_hidden_layers):
        path, site = f"backbone.layers.{layer}.mixer", whole.get(layer)
        if site is None:
            found.append(MixerSpec(layer, path, "llamba", *shape, conv_kernel=config.conv_kernel))
            continue
        donor = (len(site["heads"]), site["v_width"], site["kv_heads"], site["qk_width"])
        spec = MixerSpec(layer, f"{path}.attention", "donor_attention", *donor, conv_kernel=0, letter="A")
        found.append(spec)
    return found


def _ssm(config: PreTrainedConfig, layer: int, path: str, kind: str = "mamba2") -> MixerSpec:
    """The SSM mixer of bamba, granitemoehybrid and falcon_h1."""
    shape = (config.mamba_n_heads, config.mamba_d_head, config.mamba_n_groups, config.mamba_d_state)
    return MixerSpec(layer, path, kind, *shape, conv_kernel=config.mamba_d_conv)


def _attention(
    config: PreTrainedConfig, layer: int, path: str, letter: Letter = "A", kind: str = "attention"
) -> MixerSpec:
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    return MixerSpec(layer, path, kind, heads, width, groups, width, conv_kernel=0, letter=letter)


def _bamba(config: PreTrainedConfig) -> list[MixerSpec]:
    """`bamba` and `granitemoehybrid`."""
    return [
        _ssm(config, layer, f"model.layers.{layer}.mamba")
        if kind == "linear_attention"
        else _attention(config, layer, f"model.layers.{layer}.self_attn")
        for layer, kind in enumerate(config.layers_block_type)
    ]


def _nemotron_h(config: PreTrainedConfig) -> list[MixerSpec]:
    """Blocks of one mixer each; those of MLPs and experts have none."""
    found = []
    for layer, kind in enumerate(config.layers_block_type):
        path = f"model.layers.{layer}.mixer"
        if kind == "linear_attention":
            shape = (config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size)
            found.append(MixerSpec(layer, path, "mamba2", *shape, conv_kernel=config.conv_kernel))
        elif kind == "full_attention":
            found.append(_attention(config, layer, path))
    return found


def _zamba2(config: PreTrainedConfig) -> list[MixerSpec]:
    """Every layer has an SSM; some have a transformer block too, whose weights they share."""
    found = []
    shape = (config.n_mamba_heads, config.mamba_headdim, config.mamba_ngroups, config.mamba_d_state)
    for layer, kind in enumerate(config.layers_block_type):
        shared = kind == "hybrid"
        path = f"model.layers.{layer}.mamba_decoder.mamba" if shared else f"model.layers.{layer}.mamba"
        found.append(MixerSpec(layer, path, "mamba2", *shape, conv_kernel=config.mamba_d_conv))
        if shared:
            spec = _attention(config, layer, f"model.layers.{layer}.shared_transformer.self_attn")
            found.append(spec)
    return found


def _falcon_h1(config: PreTrainedConfig) -> list[MixerSpec]:
    """Every layer has both, side by side."""
    found = []
    for layer in range(config.num_hidden_layers):
        found.append(_ssm(config, layer, f"model.layers.{layer}.mamba", "falcon_h1"))
        found.append(_attention(config, layer, f"model.layers.{layer}.self_attn"))
    return found


def _transformer(config: PreTrainedConfig) -> list[MixerSpec]:
    return [
        _attention(config, layer, f"model.layers.{layer}.self_attn", "H") for layer in range(config.num_hidden_layers)
    ]


def _neox(config: PreTrainedConfig) -> list[MixerSpec]:
    return [
        _attention(config, layer, f"gpt_neox.layers.{layer}.attention", "H", "neox_attention")
        for layer in range(config.num_hidden_layers)
    ]


def _fields(bias: str, conv_bias: str, eps: str, config: PreTrainedConfig) -> dict[str, Any]:
    """What a branch takes over; `conv_bias` may be empty: always."""
    return {
        "bias": getattr(config, bias),
        "conv_bias": getattr(config, conv_bias) if conv_bias else True,
        "norm_eps": getattr(config, eps),
        "activation": "silu",
    }


def _stream_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Of a branch that reads Mamba-1's own streams; Falcon-Mamba normalises them."""
    own = _fields("use_bias", "use_conv_bias", "layer_norm_epsilon", config)
    return {**own, "rank": int(config.time_step_rank), "stream_eps": getattr(config, "mixer_rms_eps", None)}


def _llamba_fields(config: PreTrainedConfig) -> dict[str, Any]:
    own = _fields("use_bias", "use_conv_bias", "norm_epsilon", config)
    activation = None if config.conv_activation == "identity" else "silu"  # of which "swish" is another name
    return {**own, "activation": activation, "gate_bias": True}


Fields = Callable[[PreTrainedConfig], dict[str, Any]]
_MAMBA2_FIELDS: Fields = partial(_fields, "use_bias", "use_conv_bias", "layer_norm_epsilon")
_BAMBA_FIELDS: Fields = partial(_fields, "mamba_proj_bias", "mamba_conv_bias", "rms_norm_eps")
_ZAMBA2_FIELDS: Fields = partial(_fields, "add_bias_linear", "", "rms_norm_eps")
_PARAMS: Any = "cache_params"
_NO_SSM = "it has no SSM heads. It can be a teacher (splice.init: teacher)."
_OWN_SLOT = "all its layers keep keys and values of their own in the slot of the cache that a branch would need."

FAMILIES: tuple[Family, ...] = (
    Family("mamba2", ("mamba2", "mamba2_hybrid"), _mamba2, _PARAMS,
           (h.Mamba2HybridConfig, h.Mamba2HybridForCausalLM), branch_fields=_MAMBA2_FIELDS),
    Family("mamba2attn", ("mamba2attn_hybrid",), _mamba2, _PARAMS,
           (h.Mamba2AttnConfig, h.Mamba2AttnForCausalLM), branch_fields=_MAMBA2_FIELDS),
    Family("mamba", ("mamba", "mamba_hybrid"), partial(_mamba1, "mamba1"), _PARAMS,
           (h.MambaHybridConfig, h.MambaHybridForCausalLM), branch_fields=_stream_fields),
    Family("falcon_mamba", ("falcon_mamba", "falcon_mamba_hybrid"), partial(_mamba1, "falcon_mamba"), _PARAMS,
           (h.FalconMambaHybridConfig, h.FalconMambaHybridForCausalLM), branch_fields=_stream_fields),
    Family("llamba", ("llamba",), _llamba,
           hybrid=(h.LlambaConfig, h.LlambaForCausalLM), branch_fields=_llamba_fields),
    Family("zamba2", ("zamba2", "zamba2_hybrid"), _zamba2,
           hybrid=(h.Zamba2HybridConfig, h.Zamba2HybridForCausalLM), branch_fields=_ZAMBA2_FIELDS),
    Family("bamba", ("bamba", "bamba_hybrid"), _bamba,
           hybrid=(h.BambaHybridConfig, h.BambaHybridForCausalLM), branch_fields=_BAMBA_FIELDS),
    Family("granite", ("granitemoehybrid", "granitemoehybrid_hybrid"), _bamba,
           hybrid=(h.GraniteHybridConfig, h.GraniteHybridForCausalLM), branch_fields=_BAMBA_FIELDS),
    Family("nemotron_h", ("nemotron_h", "nemotron_h_hybrid"), _nemotron_h,
           hybrid=(h.NemotronHHybridConfig, h.NemotronHHybridForCausalLM), branch_fields=_MAMBA2_FIELDS),
    Family("falcon_h1", ("falcon_h1",), _falcon_h1, refuses=_OWN_SLOT),
    Family("transformer", ("llama", "qwen2"), _transformer, refuses=_NO_SSM),
    Family("gpt_neox", ("gpt_neox",), _neox, refuses=_NO_SSM),
)  # fmt: skip
