"""Falcon-Mamba with spliced attention heads: config, model and causal language model.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only. Everything
but the branch is transformers' own Falcon-Mamba (arXiv 2410.05355). A head is
a group of channels, and copies of it read the mixer's own streams.
"""

from transformers import FalconMambaConfig, GenerationMixin
from transformers.models.falcon_mamba.modeling_falcon_mamba import (
    FalconMambaForCausalLM,
    FalconMambaMixer,
    FalconMambaModel,
    FalconMambaPreTrainedModel,
)

from .configuration import HybridConfigMixin
from .model import HybridCausalLMMixin, HybridInitMixin, HybridModelMixin, LogitsMixin, RecordingMixin
from .streams import StreamAttention, StreamMixerMixin


class FalconMambaHybridConfig(HybridConfigMixin, FalconMambaConfig):
    """FalconMambaConfig and the fields `splice` and `channels_per_head`, the width of the channel groups."""

    model_type = "falcon_mamba_hybrid"
    branch_variants = {"ssm": StreamAttention}

    splice: list | None = None
    channels_per_head: int = 64

    @property
    def layer_types(self) -> list[str]:
        """The kind of cache of each layer."""
        return self.cache_types(["linear_attention"] * self.num_hidden_layers)

    def ssm_heads(self) -> tuple[int, int]:
        """Return how many channel groups a layer has, and their width."""
        width = min(self.channels_per_head, self.intermediate_size)
        return self.intermediate_size // width, width


class FalconMambaHybridMixer(StreamMixerMixin, FalconMambaMixer):
    """`FalconMambaMixer` with a branch where the config splices one."""


class FalconMambaHybridPreTrainedModel(HybridInitMixin, FalconMambaPreTrainedModel):
    """Flags and initialisation common to both classes."""

    config_class = FalconMambaHybridConfig
    _keep_in_fp32_modules_strict = {"A_log", "D"}
    _no_split_modules = ["FalconMambaBlock"]


class FalconMambaHybridModel(HybridModelMixin, RecordingMixin, FalconMambaHybridPreTrainedModel, FalconMambaModel):
    """`FalconMambaModel` whose mixers may have a branch."""

    reads_positions = False
    passes_kwargs = False

    def __init__(self, config: FalconMambaHybridConfig) -> None:
        super().__init__(config)
        for block in self.layers:
            FalconMambaHybridMixer.take_over(block.mixer, config)
        self.post_init()


class FalconMambaHybridForCausalLM(
    HybridCausalLMMixin, LogitsMixin, FalconMambaHybridPreTrainedModel, FalconMambaForCausalLM, GenerationMixin
):
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
