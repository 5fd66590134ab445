"""A vLLM plugin for Mamba-2 hybrids that ssm-surgery exports. vLLM calls `register` in each of its processes."""

from typing import Any

__version__ = "0.1.0"
TESTED = "0.32."  # releases of vLLM


def register() -> None:
    """Register config, shapes, checks and model. May be called more than once."""
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm import __version__ as vllm_version
    from vllm.logger import init_logger
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils.config import _CONFIG_REGISTRY
    from vllm.transformers_utils.model_arch_config_convertor import (
        MODEL_ARCH_CONFIG_CONVERTORS,
        ModelArchConfigConvertorBase,
    )

    from .config import ARCHITECTURE, OTHER_TYPES, Mamba2HybridConfig, refusing
    from .engine import EngineChecks

    if not vllm_version.startswith(TESTED):
        text = "ssm-surgery-vllm was tested with vLLM %sx. This is %s: compare its answers with transformers'."
        init_logger(__name__).warning(text, TESTED, vllm_version)

    class Convertor(ModelArchConfigConvertorBase):
        """The attention's heads and their width. `num_heads` and `head_dim` of the config are the SSM's."""

        def get_total_num_attention_heads(self) -> int:
            return self.hf_text_config.attention_shape[0]

        def get_total_num_kv_heads(self) -> int:
            return self.hf_text_config.attention_shape[0]

        def get_head_size(self) -> int:
            return self.hf_text_config.attention_shape[1]

    configs: dict[str, Any] = {name: refusing(name) for name in OTHER_TYPES}
    for model_type, config in {**configs, Mamba2HybridConfig.model_type: Mamba2HybridConfig}.items():
        _CONFIG_REGISTRY[model_type] = config  # the config class, even with --trust-remote-code
        AutoConfig.register(model_type, config, exist_ok=True)
    MODEL_ARCH_CONFIG_CONVERTORS[Mamba2HybridConfig.model_type] = Convertor
    MODELS_CONFIG_MAP[ARCHITECTURE] = EngineChecks
    ModelRegistry.register_model(ARCHITECTURE, "ssm_surgery_vllm.model:Mamba2HybridForCausalLM")
