"""The config classes of the exports that the plugin serves, and refusals for the others.

It needs transformers only, of any release that has the family. No code of the export runs.
"""

from typing import Any

from transformers import (
    FalconMambaConfig,
    GraniteMoeHybridConfig,
    Mamba2Config,
    MambaConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Zamba2Config,
)

from .splice import Layers, Site, attention_shape, conv_state_shape, read_sites, wrong

SSM = "linear_attention"  # how transformers calls a layer with an SSM mixer


class HybridConfig:
    """Put before a family's config class. The class then reads the family's fields and `splice`.

    Attributes:
        family: model type of the base.
        base_architecture: class of the base, whose settings vLLM also applies to the hybrid.
        architecture: class of the hybrid.
        streams: whether copied heads read the mixer's streams, as in Mamba-1.

    Raises:
        ValueError: the plugin does not serve such a hybrid; one line says which field is the cause.
    """

    family = base_architecture = architecture = ""
    streams = False

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.architectures:  # a config built without arguments has no splice, and is no export
            self.check()

    def check(self) -> None:
        """Raise ValueError for a hybrid that the plugin does not serve."""
        self.attention_shape()
        if self.activation() not in ("silu", "swish"):
            raise wrong("hidden_act", self.activation(), "'silu'")
        low, high = getattr(self, "time_step_limit", None) or (0.0, float("inf"))
        if low > 0 or high != float("inf"):
            raise wrong("time_step_limit", [low, high], "[0, inf]: vLLM's scan takes no other limit")

    @property
    def sites(self) -> dict[int, Site]:
        """The spliced layers."""
        kinds = getattr(self, "layers_block_type", None) or [SSM] * self.num_hidden_layers
        layers = [index for index, kind in enumerate(kinds) if kind == SSM]
        shape = Layers(layers, *self.ssm_heads(), self.streams)
        return read_sites(self.splice, getattr(self, "splice_version", 1), shape)

    def attention_shape(self, ranks: int = 1) -> tuple[int, int]:
        """Heads of every branch in vLLM, and their width, on each of so many processes."""
        return attention_shape(self.sites, self.own_attention(ranks))

    def conv_state_shape(self) -> tuple[int, int]:
        """Channels and past tokens of the branches' convolution state."""
        return conv_state_shape(self.sites)

    def activation(self) -> str:
        """The activation of the SSM mixers."""
        return self.hidden_act

    def ssm_heads(self) -> tuple[int, int]:
        """How many heads an SSM layer has, and their width."""
        raise NotImplementedError

    def own_attention(self, ranks: int = 1) -> tuple[int, int] | None:
        """Key and value heads of the family's own attention on each process, and their width; None without one."""
        return None


class Mamba2HybridConfig(HybridConfig, Mamba2Config):
    """`Mamba2Config` and the field `splice`."""

    model_type = "mamba2_hybrid"
    family, base_architecture, architecture = "mamba2", "Mamba2ForCausalLM", "Mamba2HybridForCausalLM"

    splice: list | None = None

    def ssm_heads(self) -> tuple[int, int]:
        """How many heads an SSM layer has, and their width."""
        return self.num_heads, self.head_dim


class StreamsConfig(HybridConfig):
    """A family of Mamba-1, whose heads are groups of channels."""

    streams = True

    def ssm_heads(self) -> tuple[int, int]:
        """How many groups of channels a layer has, and their width."""
        width = min(self.channels_per_head, self.intermediate_size)
        return self.intermediate_size // width, width


class MambaHybridConfig(StreamsConfig, MambaConfig):
    """`MambaConfig` and the fields `splice` and `channels_per_head`."""

    model_type = "mamba_hybrid"
    family, base_architecture, architecture = "mamba", "MambaForCausalLM", "MambaHybridForCausalLM"

    splice: list | None = None
    channels_per_head: int = 64


class FalconMambaHybridConfig(StreamsConfig, FalconMambaConfig):
    """`FalconMambaConfig` and the fields `splice` and `channels_per_head`."""

    model_type = "falcon_mamba_hybrid"
    family, base_architecture = "falcon_mamba", "FalconMambaForCausalLM"
    architecture = "FalconMambaHybridForCausalLM"

    splice: list | None = None
    channels_per_head: int = 64


class NemotronHHybridConfig(HybridConfig, NemotronHConfig):
    """`NemotronHConfig` and the field `splice`."""

    model_type = "nemotron_h_hybrid"
    family, base_architecture, architecture = "nemotron_h", "NemotronHForCausalLM", "NemotronHHybridForCausalLM"

    splice: list | None = None

    def activation(self) -> str:
        """The activation of the SSM mixers."""
        return self.mamba_hidden_act

    def ssm_heads(self) -> tuple[int, int]:
        """How many heads an SSM layer has, and their width."""
        return self.mamba_num_heads, self.mamba_head_dim

    def own_attention(self, ranks: int = 1) -> tuple[int, int] | None:
        """Key and value heads of the attention layers on each process, and their width."""
        if "full_attention" not in self.layers_block_type:
            return None
        return max(1, self.num_key_value_heads // ranks), self.head_dim


class GraniteHybridConfig(HybridConfig, GraniteMoeHybridConfig):
    """`GraniteMoeHybridConfig` and the field `splice`."""

    model_type = "granitemoehybrid_hybrid"
    family, base_architecture = "granitemoehybrid", "GraniteMoeHybridForCausalLM"
    architecture = "GraniteHybridForCausalLM"

    splice: list | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Read `layer_types`, in which an export names a spliced layer `hybrid`."""
        self.layer_types = self.layer_types and [SSM if kind == "hybrid" else kind for kind in self.layer_types]
        super().__post_init__(**kwargs)

    def ssm_heads(self) -> tuple[int, int]:
        """How many heads an SSM layer has, and their width."""
        return self.mamba_n_heads, self.mamba_d_head

    def own_attention(self, ranks: int = 1) -> tuple[int, int] | None:
        """Key and value heads of the attention layers on each process, and their width."""
        if "full_attention" not in self.layer_types:
            return None
        return max(1, self.num_key_value_heads // ranks), self.hidden_size // self.num_attention_heads


class Zamba2HybridConfig(HybridConfig, Zamba2Config):
    """`Zamba2Config` and the field `splice`."""

    model_type = "zamba2_hybrid"
    family, base_architecture, architecture = "zamba2", "Zamba2ForCausalLM", "Zamba2HybridForCausalLM"

    splice: list | None = None

    def activation(self) -> str:
        """The activation of the SSM mixers; `hidden_act` is that of the shared transformer."""
        return "silu"

    def ssm_heads(self) -> tuple[int, int]:
        """How many heads an SSM layer has, and their width."""
        return self.n_mamba_heads, self.mamba_headdim

    def own_attention(self, ranks: int = 1) -> tuple[int, int] | None:
        """Key and value heads of the shared transformer on each process, and their width."""
        if "hybrid" not in self.layers_block_type:
            return None
        return max(1, self.num_attention_heads // ranks), self.attention_head_dim


CONFIGS: tuple[Any, ...] = (
    Mamba2HybridConfig,
    MambaHybridConfig,
    FalconMambaHybridConfig,
    NemotronHHybridConfig,
    GraniteHybridConfig,
    Zamba2HybridConfig,
)
# Model types of ssm-surgery's other exports. transformers loads them with `trust_remote_code=True`.
REFUSED_TYPES = {
    "bamba_hybrid": "vLLM has no Bamba since 0.23",
    "llamba": "vLLM has no Llamba",
    "mamba2attn_hybrid": "vLLM has no Mamba-2 with attention layers in mamba_ssm's format",
}


def refusing(model_type: str) -> type[PreTrainedConfig]:
    """Return a config class that refuses a family which the plugin does not serve."""

    def from_dict(cls: Any, config_dict: dict[str, Any], **kwargs: Any) -> None:
        served = ", ".join(sorted(config.model_type for config in CONFIGS))
        raise wrong("model_type", model_type, f"{served}: {REFUSED_TYPES[model_type]}. Load it with transformers")

    return type("RefusedConfig", (PreTrainedConfig,), {"model_type": model_type, "from_dict": classmethod(from_dict)})
