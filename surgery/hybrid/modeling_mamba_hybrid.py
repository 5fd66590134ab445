"""Mamba-1 with spliced attention heads: config, model and causal language model.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only. Everything
but the branch is transformers' own Mamba-1 (arXiv 2312.00752). A head is
a group of channels, and copies of it read the mixer's own streams.
"""

from transformers import GenerationMixin, MambaConfig
from transformers.models.mamba.modeling_mamba import (
    MambaForCausalLM,
    MambaMixer,
    MambaModel,
    MambaPreTrainedModel,
)

from .configuration import HybridConfigMixin
from .model import HybridCausalLMMixin, HybridInitMixin, HybridModelMixin, LogitsMixin, RecordingMixin
from .streams import StreamAttention, StreamMixerMixin


class MambaHybridConfig(HybridConfigMixin, MambaConfig):
    """MambaConfig and the fields `splice` and `channels_per_head`, the width of the channel groups."""

    model_type = "mamba_hybrid"
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


class MambaHybridMixer(StreamMixerMixin, MambaMixer):
    """`MambaMixer` with a branch where the config splices one."""


class MambaHybridPreTrainedModel(HybridInitMixin, MambaPreTrainedModel):
    """Flags and initialisation common to both classes."""

    config_class = MambaHybridConfig
    _keep_in_fp32_modules_strict = {"A_log", "D"}
    _no_split_modules = ["MambaBlock"]


class MambaHybridModel(HybridModelMixin, RecordingMixin, MambaHybridPreTrainedModel, MambaModel):
    """`MambaModel` whose mixers may have a branch."""

    reads_positions = False
    passes_kwargs = False

    def __init__(self, config: MambaHybridConfig) -> None:
        super().__init__(config)
        for block in self.layers:
            MambaHybridMixer.take_over(block.mixer, config)
        self.post_init()


class MambaHybridForCausalLM(
    HybridCausalLMMixin, LogitsMixin, MambaHybridPreTrainedModel, MambaForCausalLM, GenerationMixin
):
    """Mamba-1 language model with spliced attention heads."""

    def __init__(self, config: MambaHybridConfig) -> None:
        super(MambaForCausalLM, self).__init__(config)
        self._build(MambaHybridModel(config))


__all__ = ["MambaHybridConfig", "MambaHybridForCausalLM", "MambaHybridModel", "MambaHybridPreTrainedModel"]
