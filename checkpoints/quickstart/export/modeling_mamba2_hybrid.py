"""Mamba-2 (arXiv 2405.21060) with spliced attention heads: config, mixer, model and causal language model."""

from transformers import GenerationMixin, Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import (
    Mamba2ForCausalLM,
    Mamba2Mixer,
    Mamba2Model,
    Mamba2PreTrainedModel,
)

from .configuration_hybrid import HybridConfigMixin
from .modeling_hybrid import (
    HybridCausalLMMixin,
    HybridInitMixin,
    HybridMixerMixin,
    HybridModelMixin,
    LogitsMixin,
    RecordingMixin,
)


class Mamba2HybridConfig(HybridConfigMixin, Mamba2Config):
    """Mamba2Config and the field `splice`."""

    model_type = "mamba2_hybrid"

    splice: list | None = None

    @property
    def layer_types(self) -> list[str]:
        """The kind of cache of each layer."""
        return self.cache_types(["linear_attention"] * self.num_hidden_layers)


class Mamba2HybridMixer(HybridMixerMixin, Mamba2Mixer):
    """`Mamba2Mixer` with a branch where the config splices one."""


class Mamba2HybridPreTrainedModel(HybridInitMixin, Mamba2PreTrainedModel):
    """Flags and initialisation common to both classes."""

    config_class = Mamba2HybridConfig


class Mamba2HybridModel(HybridModelMixin, RecordingMixin, Mamba2HybridPreTrainedModel, Mamba2Model):
    """`Mamba2Model` whose mixers may have a branch."""

    reads_positions = False

    def __init__(self, config: Mamba2HybridConfig) -> None:
        super().__init__(config)
        for index, block in enumerate(self.layers):
            block.mixer = Mamba2HybridMixer(config, index, initialize_mixer_weights=False)
        self.post_init()


class Mamba2HybridForCausalLM(
    HybridCausalLMMixin, LogitsMixin, Mamba2HybridPreTrainedModel, Mamba2ForCausalLM, GenerationMixin
):
    """Mamba-2 language model with spliced attention heads."""

    def __init__(self, config: Mamba2HybridConfig) -> None:
        super(Mamba2ForCausalLM, self).__init__(config)
        self._build(Mamba2HybridModel(config))


__all__ = ["Mamba2HybridConfig", "Mamba2HybridForCausalLM", "Mamba2HybridModel", "Mamba2HybridPreTrainedModel"]
