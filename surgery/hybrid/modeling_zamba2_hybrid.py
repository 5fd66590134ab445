"""Zamba2 with spliced attention heads: config, model and causal language model.

Everything but the branch is transformers' own Zamba2 (arXiv 2411.15242). Layers with a shared transformer keep its
keys and values in their slot of the cache, and cannot be spliced.
"""

from transformers import GenerationMixin, Zamba2Config
from transformers.models.zamba2.modeling_zamba2 import (
    Zamba2ForCausalLM,
    Zamba2MambaMixer,
    Zamba2Model,
    Zamba2PreTrainedModel,
)

from .configuration_hybrid import HybridConfigMixin
from .modeling_hybrid import HybridCausalLMMixin, HybridInitMixin, HybridMixerMixin, HybridModelMixin, recorded


class Zamba2HybridConfig(HybridConfigMixin, Zamba2Config):
    """Zamba2Config and the field `splice`."""

    model_type = "zamba2_hybrid"
    attribute_map = {"head_dim": "attention_head_dim"}

    splice: list | None = None

    @property
    def layer_types(self) -> list[str]:
        """The kind of cache of each layer; `layers_block_type` stays the kind of block."""
        return self.cache_types(self.layers_block_type)

    def ssm_heads(self) -> tuple[int, int]:
        """Return how many heads an SSM layer has, and their width."""
        return self.n_mamba_heads, self.mamba_headdim


class Zamba2HybridMixer(HybridMixerMixin, Zamba2MambaMixer):
    """`Zamba2MambaMixer` with a branch where the config splices one."""


class Zamba2HybridPreTrainedModel(HybridInitMixin, Zamba2PreTrainedModel):
    """Flags and initialisation common to both classes."""

    config_class = Zamba2HybridConfig
    _can_record_outputs = recorded(Zamba2PreTrainedModel)


class Zamba2HybridModel(HybridModelMixin, Zamba2HybridPreTrainedModel, Zamba2Model):
    """`Zamba2Model` whose SSM mixers may have a branch."""

    def __init__(self, config: Zamba2HybridConfig) -> None:
        super().__init__(config)
        for index, block in enumerate(self.layers):
            holder = block.mamba_decoder if config.layers_block_type[index] == "hybrid" else block
            holder.mamba = Zamba2HybridMixer(config, index)
        self.post_init()


class Zamba2HybridForCausalLM(HybridCausalLMMixin, Zamba2HybridPreTrainedModel, Zamba2ForCausalLM, GenerationMixin):
    """Zamba2 language model with spliced attention heads."""

    def __init__(self, config: Zamba2HybridConfig) -> None:
        super(Zamba2ForCausalLM, self).__init__(config)
        self._build(Zamba2HybridModel(config))


__all__ = ["Zamba2HybridConfig", "Zamba2HybridForCausalLM", "Zamba2HybridModel", "Zamba2HybridPreTrainedModel"]
