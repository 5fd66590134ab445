"""Falcon-Mamba with spliced attention heads: config, model and causal language model.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only. Everything
but the branch is transformers' own Falcon-Mamba (arXiv 2410.05355). A head is a group of
channels, and its branch reads the mixer's own streams.
"""

from transformers import FalconMambaConfig
from transformers.models.falcon_mamba.modeling_falcon_mamba import (
    FalconMambaForCausalLM,
    FalconMambaMixer,
    FalconMambaModel,
    FalconMambaPreTrainedModel,
)

from .attention import HybridInitMixin, HybridMixerMixin, StreamAttention
from .donor import BRANCHES
from .mixins import HybridConfigMixin, HybridModelMixin, MambaHybridCausalLMMixin


class FalconMambaHybridConfig(HybridConfigMixin, FalconMambaConfig):
    """FalconMambaConfig and the fields `splice` and `channels_per_head`, the width of the channel groups."""

    model_type = "falcon_mamba_hybrid"

    splice: list | None = None
    channels_per_head: int = 64

    @property
    def layer_types(self) -> list[str]:
        """What the cache keeps for each layer."""
        return self.cache_types(["linear_attention"] * self.num_hidden_layers)


class FalconMambaHybridMixer(HybridMixerMixin, FalconMambaMixer):
    """`FalconMambaMixer` with a branch where the config splices one."""

    branches = {**BRANCHES, "ssm": StreamAttention}
    one_by_one = True

    def __init__(self, config: FalconMambaHybridConfig, layer_idx: int, initialize_mixer_weights: bool = False) -> None:
        super().__init__(config, layer_idx, initialize_mixer_weights)
        self.splice_attention(config, layer_idx)


class FalconMambaHybridPreTrainedModel(HybridInitMixin, FalconMambaPreTrainedModel):
    """Flags and initialisation common to both classes."""

    config_class = FalconMambaHybridConfig
    _no_split_modules = ["FalconMambaBlock"]


class FalconMambaHybridModel(HybridModelMixin, FalconMambaHybridPreTrainedModel, FalconMambaModel):
    """`FalconMambaModel` whose mixers may have a branch."""

    cache_argument = "cache_params"
    hands_down = False
    packs = False

    def __init__(self, config: FalconMambaHybridConfig) -> None:
        super().__init__(config)
        for index, block in enumerate(self.layers):
            block.mixer = FalconMambaHybridMixer(config, index)
        self.post_init()


class FalconMambaHybridForCausalLM(MambaHybridCausalLMMixin, FalconMambaHybridPreTrainedModel, FalconMambaForCausalLM):
    """Falcon-Mamba language model with spliced attention heads."""

    def __init__(self, config: FalconMambaHybridConfig) -> None:
        super(FalconMambaForCausalLM, self).__init__(config)
        self._build(FalconMambaHybridModel(config))


__all__ = [
    "FalconMambaHybridConfig",
    "FalconMambaHybridForCausalLM",
    "FalconMambaHybridModel",
    "FalconMambaHybridPreTrainedModel",
]
