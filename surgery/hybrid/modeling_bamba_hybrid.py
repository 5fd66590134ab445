"""Bamba with spliced attention heads: config, model and causal language model.

Everything but the branch is transformers' own Bamba.
"""

from transformers import BambaConfig, GenerationMixin
from transformers.models.bamba.modeling_bamba import (
    BambaForCausalLM,
    BambaMixer,
    BambaModel,
    BambaPreTrainedModel,
)

from .configuration_hybrid import HybridConfigMixin
from .modeling_hybrid import HybridCausalLMMixin, HybridInitMixin, HybridMixerMixin, HybridModelMixin, recorded


class BambaHybridConfig(HybridConfigMixin, BambaConfig):
    """BambaConfig and the field `splice`."""

    model_type = "bamba_hybrid"
    attribute_map = {}

    splice: list | None = None

    @property
    def layer_types(self) -> list[str]:
        """The kind of cache of each layer; `layers_block_type` stays the kind of block."""
        return self.cache_types(self.layers_block_type)

    def ssm_heads(self) -> tuple[int, int]:
        """Return how many heads an SSM layer has, and their width."""
        return self.mamba_n_heads, self.mamba_d_head


class BambaHybridMixer(HybridMixerMixin, BambaMixer):
    """`BambaMixer` with a branch where the config splices one."""


class BambaHybridPreTrainedModel(HybridInitMixin, BambaPreTrainedModel):
    """Flags and initialisation common to both classes."""

    config_class = BambaHybridConfig
    _can_record_outputs = recorded(BambaPreTrainedModel)


class BambaHybridModel(HybridModelMixin, BambaHybridPreTrainedModel, BambaModel):
    """`BambaModel` whose SSM mixers may have a branch."""

    def __init__(self, config: BambaHybridConfig) -> None:
        super().__init__(config)
        for index, block in enumerate(self.layers):
            if config.layers_block_type[index] == "linear_attention":
                block.mamba = BambaHybridMixer(config, index)
        self.post_init()


class BambaHybridForCausalLM(HybridCausalLMMixin, BambaHybridPreTrainedModel, BambaForCausalLM, GenerationMixin):
    """Bamba language model with spliced attention heads."""

    def __init__(self, config: BambaHybridConfig) -> None:
        super(BambaForCausalLM, self).__init__(config)
        self.z_loss_coefficient = config.z_loss_coefficient
        self._build(BambaHybridModel(config))


__all__ = ["BambaHybridConfig", "BambaHybridForCausalLM", "BambaHybridModel", "BambaHybridPreTrainedModel"]
