"""Granite 4 with spliced attention heads: config, model and causal language model.

Everything but the branch is transformers' own Granite 4.
"""

from typing import Any

from transformers import GenerationMixin, GraniteMoeHybridConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridForCausalLM,
    GraniteMoeHybridMambaLayer,
    GraniteMoeHybridModel,
    GraniteMoeHybridPreTrainedModel,
)

from .configuration_hybrid import HybridConfigMixin
from .modeling_hybrid import HybridCausalLMMixin, HybridInitMixin, HybridMixerMixin, HybridModelMixin, recorded


class GraniteHybridConfig(HybridConfigMixin, GraniteMoeHybridConfig):
    """GraniteMoeHybridConfig and the field `splice`.

    `layer_types` is stored: it is the kind of cache of each layer here, and `layers_block_type` is computed from it.
    """

    model_type = "granitemoehybrid_hybrid"
    attribute_map = {}

    splice: list | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.layer_types = self.cache_types(self.layers_block_type)

    @property
    def layers_block_type(self) -> list[str]:
        """The kind of block of each layer: a spliced one is an SSM layer."""
        return ["linear_attention" if kind == "hybrid" else kind for kind in self.layer_types]

    def ssm_heads(self) -> tuple[int, int]:
        """Return how many heads an SSM layer has, and their width."""
        return self.mamba_n_heads, self.mamba_d_head


class GraniteHybridMixer(HybridMixerMixin, GraniteMoeHybridMambaLayer):
    """`GraniteMoeHybridMambaLayer` with a branch where the config splices one."""


class GraniteHybridPreTrainedModel(HybridInitMixin, GraniteMoeHybridPreTrainedModel):
    """Flags and initialisation common to both classes."""

    config_class = GraniteHybridConfig
    _can_record_outputs = recorded(GraniteMoeHybridPreTrainedModel)


class GraniteHybridModel(HybridModelMixin, GraniteHybridPreTrainedModel, GraniteMoeHybridModel):
    """`GraniteMoeHybridModel` whose SSM mixers may have a branch."""

    def __init__(self, config: GraniteHybridConfig) -> None:
        super().__init__(config)
        for index, block in enumerate(self.layers):
            if config.layers_block_type[index] == "linear_attention":
                block.mamba = GraniteHybridMixer(config, index)
        self.post_init()


class GraniteHybridForCausalLM(
    HybridCausalLMMixin, GraniteHybridPreTrainedModel, GraniteMoeHybridForCausalLM, GenerationMixin
):
    """Granite 4 language model with spliced attention heads."""

    def __init__(self, config: GraniteHybridConfig) -> None:
        super(GraniteMoeHybridForCausalLM, self).__init__(config)
        self.router_aux_loss_coef, self.logits_scaling = config.router_aux_loss_coef, config.logits_scaling
        self.num_experts, self.num_experts_per_tok = config.num_local_experts, config.num_experts_per_tok
        self._build(GraniteHybridModel(config))


__all__ = ["GraniteHybridConfig", "GraniteHybridForCausalLM", "GraniteHybridModel", "GraniteHybridPreTrainedModel"]
