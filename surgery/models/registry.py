"""The model families, and `register_family`, which adds one.

Layouts are read from configs only; module paths are those of transformers' causal language models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import PreTrainedConfig

from surgery import hybrid as h
from surgery.errors import ModelError
from surgery.hybrid.sites import is_whole
from surgery.models.layouts import CacheArgument, Family, HybridClasses
from surgery.registry import Registry
from surgery.types import Letter, MixerSpec

Layout = Callable[[PreTrainedConfig], list[MixerSpec]]
FAMILIES: Registry[Family] = Registry("model family")


def families() -> tuple[Family, ...]:
    """Return every family, in the order of registration."""
    return tuple(family for _, family in FAMILIES.items())


def register_family(
    name: str,
    *model_types: str,
    cache_argument: CacheArgument = "past_key_values",
    hybrid: HybridClasses | None = None,
    refuses: str = "",
    **fields: Any,
) -> Callable[[Layout], Layout]:
    """Decorate a layout, which returns the mixers of a config: its model types are then supported.

    Args:
        model_types: of the plain models; the hybrid's own is added.
        cache_argument: the name of the cache in the model's forward.
        hybrid: config, model and causal language model of its hybrids. They are registered with transformers.
        refuses: without `hybrid`, the reason why nothing can be spliced into it.
        fields: as of `Family`: `branch_fields`, `tiny`, ...

    Raises:
        ModelError: another family has this name or one of the model types. Registering a layout again replaces it.
    """
    types = tuple(dict.fromkeys((*model_types, *([hybrid[0].model_type] if hybrid else []))))
    if hybrid is None and not refuses:
        refuses = "no hybrid classes are registered for it."

    def register(layout: Layout) -> Layout:
        for family in families():
            if family.name == name and _is_again(family.layout, layout):
                continue
            for taken in sorted({name} & {family.name} | set(types) & set(family.model_types)):
                raise ModelError("model_type", taken, f"The family {family.name} has it already. Choose another name.")
        if hybrid is not None:
            h.register_classes(*hybrid)
        FAMILIES.register(name, Family(name, types, layout, cache_argument, hybrid, refuses, **fields))
        return layout

    return register


def _is_again(present: Layout, layout: Layout) -> bool:
    """Return whether both are the same function, as after a reload of its module."""
    names = [(getattr(f, "__module__", None), getattr(f, "__qualname__", None)) for f in (present, layout)]
    return names[0] == names[1]


CHANNELS_PER_HEAD = 64  # Mamba-1 has channels only; `base.channels_per_head` is how many make a head


def _mamba2(config: PreTrainedConfig) -> list[MixerSpec]:
    """`mamba2`: every layer has one mixer, an SSM or mamba_ssm's attention."""
    attention = set(getattr(config, "attn_layer_idx", None) or [])
    mixers = []
    for layer in range(config.num_hidden_layers):
        path = f"backbone.layers.{layer}.mixer"
        if layer in attention:
            mixers.append(_mamba_ssm_attention(config, layer, path))
            continue
        shape = (config.num_heads, config.head_dim, config.n_groups, config.state_size)
        mixers.append(MixerSpec(layer, path, "mamba2", *shape, conv_kernel=config.conv_kernel))
    return mixers


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
    """Layers whose mixer was replaced by a teacher's attention are attention layers."""
    whole = {site["layer"]: site for site in config.splice or [] if is_whole(site)}
    shape = (config.num_heads, config.head_dim, config.n_groups, config.state_size)
    mixers = []
    for layer in range(config.num_hidden_layers):
        path, site = f"backbone.layers.{layer}.mixer", whole.get(layer)
        if site is None:
            mixers.append(MixerSpec(layer, path, "llamba", *shape, conv_kernel=config.conv_kernel))
            continue
        donor = (len(site["heads"]), site["v_width"], site["kv_heads"], site["qk_width"])
        spec = MixerSpec(layer, f"{path}.attention", "donor_attention", *donor, conv_kernel=0, letter="A")
        mixers.append(spec)
    return mixers


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
    """Blocks of one mixer each; those of MLPs and experts have no mixer."""
    mixers = []
    for layer, kind in enumerate(config.layers_block_type):
        path = f"model.layers.{layer}.mixer"
        if kind == "linear_attention":
            shape = (config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size)
            mixers.append(MixerSpec(layer, path, "mamba2", *shape, conv_kernel=config.conv_kernel))
        elif kind == "full_attention":
            mixers.append(_attention(config, layer, path))
    return mixers


def _zamba2(config: PreTrainedConfig) -> list[MixerSpec]:
    """Every layer has an SSM; some also have a transformer block, whose weights they share."""
    mixers = []
    shape = (config.n_mamba_heads, config.mamba_headdim, config.mamba_ngroups, config.mamba_d_state)
    for layer, kind in enumerate(config.layers_block_type):
        shared = kind == "hybrid"
        path = f"model.layers.{layer}.mamba_decoder.mamba" if shared else f"model.layers.{layer}.mamba"
        mixers.append(MixerSpec(layer, path, "mamba2", *shape, conv_kernel=config.mamba_d_conv))
        if shared:
            spec = _attention(config, layer, f"model.layers.{layer}.shared_transformer.self_attn")
            mixers.append(spec)
    return mixers


def _falcon_h1(config: PreTrainedConfig) -> list[MixerSpec]:
    """Every layer has an SSM and attention side by side."""
    mixers = []
    for layer in range(config.num_hidden_layers):
        mixers.append(_ssm(config, layer, f"model.layers.{layer}.mamba", "falcon_h1"))
        mixers.append(_attention(config, layer, f"model.layers.{layer}.self_attn"))
    return mixers


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
    """Return the fields that a branch copies. An empty `conv_bias` means that convolutions always have one."""
    return {
        "bias": getattr(config, bias),
        "conv_bias": getattr(config, conv_bias) if conv_bias else True,
        "norm_eps": getattr(config, eps),
        "activation": "silu",
    }


def _stream_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """As `_fields`, and those of a branch that reads Mamba-1's streams; Falcon-Mamba normalises them."""
    fields = _fields("use_bias", "use_conv_bias", "layer_norm_epsilon", config)
    return {**fields, "rank": int(config.time_step_rank), "stream_eps": getattr(config, "mixer_rms_eps", None)}


def _llamba_fields(config: PreTrainedConfig) -> dict[str, Any]:
    fields = _fields("use_bias", "use_conv_bias", "norm_epsilon", config)
    activation = None if config.conv_activation == "identity" else "silu"  # "swish" is another name of it
    return {**fields, "activation": activation, "gate_bias": True}


Fields = Callable[[PreTrainedConfig], dict[str, Any]]
_MAMBA2_FIELDS: Fields = partial(_fields, "use_bias", "use_conv_bias", "layer_norm_epsilon")
_BAMBA_FIELDS: Fields = partial(_fields, "mamba_proj_bias", "mamba_conv_bias", "rms_norm_eps")
_ZAMBA2_FIELDS: Fields = partial(_fields, "add_bias_linear", "", "rms_norm_eps")
_NO_SSM = "it has no SSM heads. It can be a teacher (splice.init: teacher)."
_OWN_SLOT = "all its layers have keys and values in the slot of the cache that a branch would need."
_PER_GROUP = "5.23"  # before, transformers took one mean square over all groups in the gated norm of these types


def _classes(name: str) -> HybridClasses:
    return tuple(getattr(h, f"{name}{part}") for part in ("Config", "Model", "ForCausalLM"))  # type: ignore[return-value]


register_family(
    "mamba2",
    "mamba2",
    cache_argument="cache_params",
    hybrid=_classes("Mamba2Hybrid"),
    branch_fields=_MAMBA2_FIELDS,
    norm_by_group_since=_PER_GROUP,
)(_mamba2)
register_family(
    "mamba2attn", cache_argument="cache_params", hybrid=_classes("Mamba2Attn"), branch_fields=_MAMBA2_FIELDS
)(_mamba2)
register_family(
    "mamba",
    "mamba",
    cache_argument="cache_params",
    hybrid=_classes("MambaHybrid"),
    branch_fields=_stream_fields,
    groups_channels=True,
)(partial(_mamba1, "mamba1"))
register_family(
    "falcon_mamba",
    "falcon_mamba",
    cache_argument="cache_params",
    hybrid=_classes("FalconMambaHybrid"),
    branch_fields=_stream_fields,
    groups_channels=True,
)(partial(_mamba1, "falcon_mamba"))
register_family("llamba", "llamba", hybrid=_classes("Llamba"), branch_fields=_llamba_fields)(_llamba)
register_family("zamba2", "zamba2", hybrid=_classes("Zamba2Hybrid"), branch_fields=_ZAMBA2_FIELDS)(_zamba2)
register_family(
    "bamba",
    "bamba",
    hybrid=_classes("BambaHybrid"),
    branch_fields=_BAMBA_FIELDS,
    norm_by_group_since=_PER_GROUP,
)(_bamba)
register_family(
    "granite",
    "granitemoehybrid",
    hybrid=_classes("GraniteHybrid"),
    branch_fields=_BAMBA_FIELDS,
    norm_by_group_since=_PER_GROUP,
)(_bamba)
register_family("nemotron_h", "nemotron_h", hybrid=_classes("NemotronHHybrid"), branch_fields=_MAMBA2_FIELDS)(
    _nemotron_h
)
register_family("falcon_h1", "falcon_h1", refuses=_OWN_SLOT)(_falcon_h1)
register_family("transformer", "llama", "qwen2", refuses=_NO_SSM, is_donor=True)(_transformer)
register_family("gpt_neox", "gpt_neox", refuses=_NO_SSM, is_donor=True)(_neox)
