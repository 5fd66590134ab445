"""Nemotron-H with spliced attention heads: config, model and causal language model.

Everything but the branch is transformers' own Nemotron-H (arXiv 2504.03624).
"""

from transformers import GenerationMixin, NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import (
    NemotronHForCausalLM,
    NemotronHMamba2Mixer,
    NemotronHModel,
    NemotronHPreTrainedModel,
)

from .configuration_hybrid import HybridConfigMixin
from .modeling_hybrid import HybridCausalLMMixin, HybridInitMixin, HybridMixerMixin, HybridModelMixin, recorded


class NemotronHHybridConfig(HybridConfigMixin, NemotronHConfig):
    """NemotronHConfig and the field `splice`."""

    model_type = "nemotron_h_hybrid"
    attribute_map = {"num_local_experts": "n_routed_experts"}

    splice: list | None = None

    @property
    def layer_types(self) -> list[str]:
        """The kind of cache of each layer; `layers_block_type` stays the kind of block."""
        return self.cache_types(self.layers_block_type) if self.layers_block_type else self.layers_block_type

    @layer_types.setter
    def layer_types(self, value: list[str]) -> None:
        """Set the kinds of block: the parent uses this name."""
        self.layers_block_type = value

    def ssm_heads(self) -> tuple[int, int]:
        """Return how many heads an SSM layer has, and their width."""
        return self.mamba_num_heads, self.mamba_head_dim


class NemotronHHybridMixer(HybridMixerMixin, NemotronHMamba2Mixer):
    """`NemotronHMamba2Mixer` with a branch where the config splices one."""


class NemotronHHybridPreTrainedModel(HybridInitMixin, NemotronHPreTrainedModel):
    """Flags and initialisation common to both classes."""

    config_class = NemotronHHybridConfig
    _can_record_outputs = recorded(NemotronHPreTrainedModel)
    _keep_in_fp32_modules_strict = {
        *HybridInitMixin._keep_in_fp32_modules_strict,
        *NemotronHPreTrainedModel._keep_in_fp32_modules_strict,  # the experts' router
    }


class NemotronHHybridModel(HybridModelMixin, NemotronHHybridPreTrainedModel, NemotronHModel):
    """`NemotronHModel` whose SSM mixers may have a branch."""

    def __init__(self, config: NemotronHHybridConfig) -> None:
        super().__init__(config)
        for index, block in enumerate(self.layers):
            if config.layers_block_type[index] == "linear_attention":
                block.mixer = NemotronHHybridMixer(config, index)
        self.post_init()


class NemotronHHybridForCausalLM(
    HybridCausalLMMixin, NemotronHHybridPreTrainedModel, NemotronHForCausalLM, GenerationMixin
):
    """Nemotron-H language model with spliced attention heads."""

    def __init__(self, config: NemotronHHybridConfig) -> None:
        super(NemotronHForCausalLM, self).__init__(config)
        self._build(NemotronHHybridModel(config))


__all__ = [
    "NemotronHHybridConfig",
    "NemotronHHybridForCausalLM",
    "NemotronHHybridModel",
    "NemotronHHybridPreTrainedModel",
]
