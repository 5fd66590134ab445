"""The config class of the exports that the plugin serves, and refusals for the others.

It needs transformers only, of any release that has Mamba-2. No code of the export runs.
"""

from typing import Any

from transformers import Mamba2Config, PreTrainedConfig

from .splice import Site, attention_shape, conv_state_shape, read_sites, wrong

ARCHITECTURE = "Mamba2HybridForCausalLM"

# Model types of ssm-surgery's other exports. transformers loads them with `trust_remote_code=True`.
OTHER_TYPES = (
    "bamba_hybrid",
    "falcon_mamba_hybrid",
    "granitemoehybrid_hybrid",
    "llamba",
    "mamba2attn_hybrid",
    "mamba_hybrid",
    "nemotron_h_hybrid",
    "zamba2_hybrid",
)


class Mamba2HybridConfig(Mamba2Config):
    """`Mamba2Config` and the field `splice`.

    Raises:
        ValueError: the plugin does not serve such a hybrid; one line says which field is the cause.
    """

    model_type = "mamba2_hybrid"

    splice: list | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.architectures:  # a config built without arguments has no splice, and is no export
            self.check()

    def check(self) -> None:
        """Raise ValueError for a hybrid that the plugin does not serve."""
        attention_shape(self.sites)
        if self.hidden_act not in ("silu", "swish"):
            raise wrong("hidden_act", self.hidden_act, "'silu'")
        low, high = self.time_step_limit
        if low > 0 or high != float("inf"):
            raise wrong("time_step_limit", list(self.time_step_limit), "[0, inf]: vLLM's scan takes no other limit")

    @property
    def sites(self) -> dict[int, Site]:
        """The spliced layers."""
        version = getattr(self, "splice_version", 1)
        return read_sites(self.splice, version, self.num_hidden_layers, self.num_heads, self.head_dim)

    @property
    def attention_shape(self) -> tuple[int, int]:
        """Heads of every attention layer in vLLM, and their width."""
        return attention_shape(self.sites)

    @property
    def conv_state_shape(self) -> tuple[int, int]:
        """Channels and past tokens of the branches' convolution state."""
        return conv_state_shape(self.sites)


def refusing(model_type: str) -> type[PreTrainedConfig]:
    """Return a config class that refuses a family which the plugin does not serve."""

    def from_dict(cls: Any, config_dict: dict[str, Any], **kwargs: Any) -> None:
        raise wrong("model_type", model_type, "'mamba2_hybrid'. Load other families with transformers")

    return type("RefusedConfig", (PreTrainedConfig,), {"model_type": model_type, "from_dict": classmethod(from_dict)})
