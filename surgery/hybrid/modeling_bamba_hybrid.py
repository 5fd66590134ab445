"""Bamba with spliced attention heads: config, model and causal language model.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only. Everything
but the branch is transformers' own Bamba.
"""

from transformers import BambaConfig
from transformers.models.bamba.modeling_bamba import (
    BambaForCausalLM,
    BambaMixer,
    BambaModel,
    BambaPreTrainedModel,
)
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from .attention import HybridInitMixin, HybridMixerMixin
from .donor import BRANCHES
from .mixins import HybridCausalLMMixin, HybridConfigMixin, HybridModelMixin


class BambaHybridConfig(HybridConfigMixin, BambaConfig):
    """BambaConfig and the field `splice`."""

    model_type = "bamba_hybrid"
    attribute_map = {}

    splice: list | None = None

    @property
    def layer_types(self) -> list[str]:
        """What the cache keeps for each layer; `layers_block_type` still says what is built."""
        return self.cache_types(self.layers_block_type)


class BambaHybridMixer(HybridMixerMixin, BambaMixer):
    """`BambaMixer` with a branch where the config splices one."""

    branches = BRANCHES

    def __init__(self, config: BambaHybridConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        # The family's own takes one mean square over all groups in releases before 5.23; from there on they are equal.
        width = self.intermediate_size
        self.norm = Zamba2RMSNormGated(width, width // self.n_groups, eps=self.norm.variance_epsilon)
        self.splice_attention(config, layer_idx)


class BambaHybridPreTrainedModel(HybridInitMixin, BambaPreTrainedModel):
    """Flags and initialisation common to both classes."""

    config_class = BambaHybridConfig


class BambaHybridModel(HybridModelMixin, BambaHybridPreTrainedModel, BambaModel):
    """`BambaModel` whose SSM mixers may have a branch."""

    def __init__(self, config: BambaHybridConfig) -> None:
        super().__init__(config)
        for index, block in enumerate(self.layers):
            if config.layers_block_type[index] == "linear_attention":
                block.mamba = BambaHybridMixer(config, index)
        self.post_init()


class BambaHybridForCausalLM(HybridCausalLMMixin, BambaHybridPreTrainedModel, BambaForCausalLM):
    """Bamba language model with spliced attention heads."""

    def __init__(self, config: BambaHybridConfig) -> None:
        super().__init__(config)
        self.model = BambaHybridModel(config)
        self.post_init()


__all__ = ["BambaHybridConfig", "BambaHybridForCausalLM", "BambaHybridModel", "BambaHybridPreTrainedModel"]
