"""The model families, and `register_family`, which adds one.

Layouts are read from configs only; module paths are those of transformers' causal language models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

from surgery import hybrid as h
from surgery.errors import ModelError
from surgery.hybrid.configuration_hybrid import is_whole
from surgery.models.layouts import Family, HybridClasses
from surgery.registry import Registry
from surgery.types import Letter, MixerSpec

Layout = Callable[[PreTrainedConfig], list[MixerSpec]]
FAMILIES: Registry[Family] = Registry("model family")


def families() -> tuple[Family, ...]:
    """Return all families, in the order of registration."""
    return tuple(family for _, family in FAMILIES.items())


def register_family(
    name: str, *model_types: str, hybrid: HybridClasses | None = None, refuses: str = "", **fields: Any
) -> Callable[[Layout], Layout]:
    """Register a layout function, which returns the mixers of a config, and so support its model types.

    Args:
        name: name of the family.
        model_types: model types of the plain models. That of the hybrid is added.
        hybrid: classes of its hybrids (config, model, causal language model). They are registered with transformers.
        refuses: without `hybrid`, the reason why nothing can be spliced.
        fields: other fields of `Family`: `reads_positions`, `branch_fields`, `tiny`, ...

    Raises:
        ModelError: another family has this name or one of the model types. Registering a layout again replaces it.
    """
    types = tuple(dict.fromkeys((*model_types, *([hybrid[0].model_type] if hybrid else []))))
    if hybrid is None and not refuses:
        refuses = "no hybrid classes are registered for it."

    def register(layout: Layout) -> Layout:
        place = (layout.__module__, layout.__qualname__)
        for family in families():
            if family.name == name and place == (family.layout.__module__, family.layout.__qualname__):
                continue  # a reload of its module
            for taken in sorted({name} & {family.name} | set(types) & set(family.model_types)):
                hint = f"The family {family.name} has this name already. Use another one."
                raise ModelError("model_type", taken, hint)
        if hybrid is not None:
            h.register_classes(*hybrid)
        FAMILIES.register(name, Family(name, types, layout, hybrid=hybrid, refuses=refuses, **fields))
        return layout

    return register


CHANNELS_PER_HEAD = 64  # default of `base.channels_per_head`: Mamba-1 has channels and no heads
_NO_SSM = "it has no SSM heads. It can be a teacher (splice.init: teacher)."
_OWN_SLOT = "all its layers have attention, which uses the cache slot that a spliced branch needs."

Fields = Callable[[PreTrainedConfig], dict[str, Any]]


def _classes(name: str) -> HybridClasses:
    return tuple(getattr(h, f"{name}{part}") for part in ("Config", "Model", "ForCausalLM"))  # type: ignore[return-value]


def _copied(bias: str, conv_bias: str, norm_eps: str) -> Fields:
    """Return the `branch_fields` of a family from the key names of its config. An empty `conv_bias` means True."""
    return lambda config: {
        "bias": getattr(config, bias),
        "conv_bias": getattr(config, conv_bias) if conv_bias else True,
        "norm_eps": getattr(config, norm_eps),
        "activation": "silu",
    }


_MAMBA_FIELDS = _copied("use_bias", "use_conv_bias", "layer_norm_epsilon")


def _stream_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Branch fields of Mamba-1, with those of the branch that reads its streams. Falcon-Mamba normalises these."""
    streams = {"rank": int(config.time_step_rank), "stream_eps": getattr(config, "mixer_rms_eps", None)}
    return {**_MAMBA_FIELDS(config), **streams}


def _llamba_fields(config: PreTrainedConfig) -> dict[str, Any]:
    activation = None if config.conv_activation == "identity" else "silu"  # "swish" is another name of it
    return {**_MAMBA_FIELDS(config), "activation": activation, "gate_bias": True}


def _mamba_ssm_attention(config: PreTrainedConfig, layer: int, path: str) -> MixerSpec:
    fields = config.attn_cfg
    heads = fields["num_heads"]
    width = fields.get("head_dim") or config.hidden_size // heads
    groups = fields.get("num_heads_kv") or heads
    kernel = fields.get("d_conv") or 0
    return MixerSpec(layer, path, "mamba_ssm_attention", heads, width, groups, width, letter="A", conv_kernel=kernel)


_MAMBA2: dict[str, Any] = {"reads_positions": False, "branch_fields": _MAMBA_FIELDS, "state_field": "state_size"}


@register_family("mamba2attn", hybrid=_classes("Mamba2Attn"), **_MAMBA2)
@register_family("mamba2", "mamba2", hybrid=_classes("Mamba2Hybrid"), **_MAMBA2)
def _mamba2(config: PreTrainedConfig) -> list[MixerSpec]:
    """Every layer has one mixer: an SSM, or mamba_ssm's attention."""
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


_MAMBA1: dict[str, Any] = {"reads_positions": False, "branch_fields": _stream_fields, "groups_channels": True}


@register_family("falcon_mamba", "falcon_mamba", hybrid=_classes("FalconMambaHybrid"), **_MAMBA1)
@register_family("mamba", "mamba", hybrid=_classes("MambaHybrid"), **_MAMBA1)
def _mamba1(config: PreTrainedConfig) -> list[MixerSpec]:
    """Every layer has one mixer, whose heads are groups of channels."""
    kind = "falcon_mamba" if config.model_type.startswith("falcon") else "mamba1"
    width = getattr(config, "channels_per_head", None) or CHANNELS_PER_HEAD
    width = min(width, config.intermediate_size)
    if config.intermediate_size % width:
        hint = f"Heads are groups of channels. Set it to a divisor of the {config.intermediate_size} channels."
        raise ModelError("base.channels_per_head", width, hint)
    shape = (config.intermediate_size // width, width, 1, config.state_size)
    more = {"native_heads": width == 1, "conv_kernel": config.conv_kernel}
    layers = range(config.num_hidden_layers)
    return [MixerSpec(layer, f"backbone.layers.{layer}.mixer", kind, *shape, **more) for layer in layers]


@register_family(
    "llamba", "llamba", hybrid=_classes("Llamba"), branch_fields=_llamba_fields, state_field="ssm_cfg.d_state"
)
def _llamba(config: PreTrainedConfig) -> list[MixerSpec]:
    """Every layer has one mixer. One that was replaced by a teacher's attention counts as attention."""
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


@register_family(
    "zamba2",
    "zamba2",
    hybrid=_classes("Zamba2Hybrid"),
    branch_fields=_copied("add_bias_linear", "", "rms_norm_eps"),
    state_field="mamba_d_state",
    lower_limit="time_step_min",
)
def _zamba2(config: PreTrainedConfig) -> list[MixerSpec]:
    """Every layer has an SSM. Some also have a transformer block, with shared weights."""
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


_BAMBA: dict[str, Any] = {
    "branch_fields": _copied("mamba_proj_bias", "mamba_conv_bias", "rms_norm_eps"),
    "state_field": "mamba_d_state",
}


@register_family("granite", "granitemoehybrid", hybrid=_classes("GraniteHybrid"), **_BAMBA)
@register_family("bamba", "bamba", hybrid=_classes("BambaHybrid"), **_BAMBA)
def _bamba(config: PreTrainedConfig) -> list[MixerSpec]:
    """Every layer has one mixer: an SSM, or attention."""
    return [
        _ssm(config, layer, f"model.layers.{layer}.mamba")
        if kind == "linear_attention"
        else _attention(config, layer, f"model.layers.{layer}.self_attn")
        for layer, kind in enumerate(config.layers_block_type)
    ]


@register_family(
    "nemotron_h",
    "nemotron_h",
    hybrid=_classes("NemotronHHybrid"),
    branch_fields=_MAMBA_FIELDS,
    state_field="ssm_state_size",
    lower_limit="time_step_min",
)
def _nemotron_h(config: PreTrainedConfig) -> list[MixerSpec]:
    """Every block has one mixer, except for blocks with an MLP or experts."""
    mixers = []
    for layer, kind in enumerate(config.layers_block_type):
        path = f"model.layers.{layer}.mixer"
        if kind == "linear_attention":
            shape = (config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size)
            mixers.append(MixerSpec(layer, path, "mamba2", *shape, conv_kernel=config.conv_kernel))
        elif kind == "full_attention":
            mixers.append(_attention(config, layer, path))
    return mixers


@register_family("falcon_h1", "falcon_h1", refuses=_OWN_SLOT)
def _falcon_h1(config: PreTrainedConfig) -> list[MixerSpec]:
    """Every layer has an SSM and attention side by side."""
    mixers = []
    for layer in range(config.num_hidden_layers):
        mixers.append(_ssm(config, layer, f"model.layers.{layer}.mamba", "falcon_h1"))
        mixers.append(_attention(config, layer, f"model.layers.{layer}.self_attn"))
    return mixers


@register_family("transformer", "llama", "qwen2", refuses=_NO_SSM, is_donor=True)
def _transformer(config: PreTrainedConfig) -> list[MixerSpec]:
    return [
        _attention(config, layer, f"model.layers.{layer}.self_attn", "H") for layer in range(config.num_hidden_layers)
    ]


@register_family("gpt_neox", "gpt_neox", refuses=_NO_SSM, is_donor=True)
def _neox(config: PreTrainedConfig) -> list[MixerSpec]:
    return [
        _attention(config, layer, f"gpt_neox.layers.{layer}.attention", "H", "neox_attention")
        for layer in range(config.num_hidden_layers)
    ]
