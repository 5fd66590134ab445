"""Mamba-1 with spliced attention heads: config, model and causal language model.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only. Everything
but the branch is transformers' own Mamba-1 (arXiv 2312.00752). A head is a group of
channels, and its branch reads the mixer's own streams.
"""

from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import (
    MambaForCausalLM,
    MambaMixer,
    MambaModel,
    MambaPreTrainedModel,
)

from .attention import HybridInitMixin, HybridMixerMixin, StreamAttention
from .donor import BRANCHES
from .mixins import HybridConfigMixin, HybridModelMixin, MambaHybridCausalLMMixin


class MambaHybridConfig(HybridConfigMixin, MambaConfig):
    """MambaConfig and the fields `splice` and `channels_per_head`, the width of the channel groups."""

    model_type = "mamba_hybrid"

    splice: list | None = None
    channels_per_head: int = 64

    @property
    def layer_types(self) -> list[str]:
        """What the cache keeps for each layer."""
        return self.cache_types(["linear_attention"] * self.num_hidden_layers)


class MambaHybridMixer(HybridMixerMixin, MambaMixer):
    """`MambaMixer` with a branch where the config splices one."""

    branches = {**BRANCHES, "ssm": StreamAttention}
    one_by_one = True

    def __init__(self, config: MambaHybridConfig, layer_idx: int, initialize_mixer_weights: bool = False) -> None:
        super().__init__(config, layer_idx, initialize_mixer_weights)
        self.splice_attention(config, layer_idx)


class MambaHybridPreTrainedModel(HybridInitMixin, MambaPreTrainedModel):
    """Flags and initialisation common to both classes."""

    config_class = MambaHybridConfig
    _no_split_modules = ["MambaBlock"]


class MambaHybridModel(HybridModelMixin, MambaHybridPreTrainedModel, MambaModel):
    """`MambaModel` whose mixers may have a branch."""

    cache_argument = "cache_params"
    hands_down = False
    packs = False

    def __init__(self, config: MambaHybridConfig) -> None:
        super().__init__(config)
        for index, block in enumerate(self.layers):
            block.mixer = MambaHybridMixer(config, index)
        self.post_init()


class MambaHybridForCausalLM(MambaHybridCausalLMMixin, MambaHybridPreTrainedModel, MambaForCausalLM):
    """Mamba-1 language model with spliced attention heads."""

    def __init__(self, config: MambaHybridConfig) -> None:
        super(MambaForCausalLM, self).__init__(config)
        self._build(MambaHybridModel(config))


__all__ = ["MambaHybridConfig", "MambaHybridForCausalLM", "MambaHybridModel", "MambaHybridPreTrainedModel"]
