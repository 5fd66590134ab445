"""Granite 4 with spliced attention heads: config, model and causal language model.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only. Everything
but the branch is transformers' own Granite 4.
"""

from typing import Any

from transformers import GraniteMoeHybridConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridForCausalLM,
    GraniteMoeHybridMambaLayer,
    GraniteMoeHybridModel,
    GraniteMoeHybridPreTrainedModel,
)
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from .attention import HybridInitMixin, HybridMixerMixin
from .donor import BRANCHES
from .mixins import HybridCausalLMMixin, HybridConfigMixin, HybridModelMixin


class GraniteHybridConfig(HybridConfigMixin, GraniteMoeHybridConfig):
    """GraniteMoeHybridConfig and the field `splice`.

    `layer_types` is stored, so here it is what the cache keeps, and what is built is read back from it.
    """

    model_type = "granitemoehybrid_hybrid"
    attribute_map = {}

    splice: list | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.layer_types = self.cache_types(self.layers_block_type)

    @property
    def layers_block_type(self) -> list[str]:
        """What is built: a spliced layer is an SSM layer."""
        return ["linear_attention" if kind == "hybrid" else kind for kind in self.layer_types]


class GraniteHybridMixer(HybridMixerMixin, GraniteMoeHybridMambaLayer):
    """`GraniteMoeHybridMambaLayer` with a branch where the config splices one."""

    branches = BRANCHES

    def __init__(self, config: GraniteHybridConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        # The family's own takes one mean square over all groups in releases before 5.23; from there on they are equal.
        width = self.intermediate_size
        self.norm = Zamba2RMSNormGated(width, width // self.n_groups, eps=self.norm.variance_epsilon)
        self.splice_attention(config, layer_idx)


class GraniteHybridPreTrainedModel(HybridInitMixin, GraniteMoeHybridPreTrainedModel):
    """Flags and initialisation common to both classes."""

    config_class = GraniteHybridConfig


class GraniteHybridModel(HybridModelMixin, GraniteHybridPreTrainedModel, GraniteMoeHybridModel):
    """`GraniteMoeHybridModel` whose SSM mixers may have a branch."""

    def __init__(self, config: GraniteHybridConfig) -> None:
        super().__init__(config)
        for index, block in enumerate(self.layers):
            if config.layers_block_type[index] == "linear_attention":
                block.mamba = GraniteHybridMixer(config, index)
        self.post_init()


class GraniteHybridForCausalLM(HybridCausalLMMixin, GraniteHybridPreTrainedModel, GraniteMoeHybridForCausalLM):
    """Granite 4 language model with spliced attention heads."""

    def __init__(self, config: GraniteHybridConfig) -> None:
        super().__init__(config)
        self.model = GraniteHybridModel(config)
        self.post_init()


__all__ = ["GraniteHybridConfig", "GraniteHybridForCausalLM", "GraniteHybridModel", "GraniteHybridPreTrainedModel"]
