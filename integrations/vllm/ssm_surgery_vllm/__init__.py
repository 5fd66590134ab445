"""A vLLM plugin for hybrids that ssm-surgery exports. vLLM calls `register` in each of its processes."""

from typing import Any

TESTED = "0.32."  # releases of vLLM


def register() -> None:
    """Register configs, shapes, checks and models. May be called more than once."""
    from vllm import __version__ as vllm_version
    from vllm.logger import init_logger

    if not vllm_version.startswith(TESTED):
        text = "ssm-surgery-vllm was tested with vLLM %sx. This is %s: compare its answers with transformers'."
        init_logger(__name__).warning(text, TESTED, vllm_version)
    try:
        from transformers import AutoConfig
        from vllm import ModelRegistry
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP
        from vllm.transformers_utils.config import _CONFIG_REGISTRY
        from vllm.transformers_utils.model_arch_config_convertor import (
            MODEL_ARCH_CONFIG_CONVERTORS,
            ModelArchConfigConvertorBase,
        )

        from .config import CONFIGS, REFUSED_TYPES, refusing
        from .engine import EngineChecks
    except ImportError as error:  # vLLM would stop for every model, not for hybrids alone
        init_logger(__name__).error("ssm-surgery-vllm serves no hybrids with vLLM %s: %s", vllm_version, error)
        return

    class BranchConvertor(ModelArchConfigConvertorBase):
        """For a base without attention: the branches' heads and width. `num_heads`, `head_dim` are the SSM's."""

        def get_total_num_attention_heads(self) -> int:
            return self.hf_text_config.attention_shape()[0]

        def get_total_num_kv_heads(self) -> int:
            return self.hf_text_config.attention_shape()[0]

        def get_head_size(self) -> int:
            return self.hf_text_config.attention_shape()[1]

    configs: dict[str, Any] = {name: refusing(name) for name in REFUSED_TYPES}
    for model_type, config in {**configs, **{config.model_type: config for config in CONFIGS}}.items():
        _CONFIG_REGISTRY[model_type] = config  # the config class, even with --trust-remote-code
        AutoConfig.register(model_type, config, exist_ok=True)
    for config in CONFIGS:
        own = MODEL_ARCH_CONFIG_CONVERTORS.get(config.family, ModelArchConfigConvertorBase)
        pure = config.own_attention is CONFIGS[0].own_attention
        MODEL_ARCH_CONFIG_CONVERTORS[config.model_type] = BranchConvertor if pure else own
        checks = {"base": MODELS_CONFIG_MAP.get(config.base_architecture)}
        MODELS_CONFIG_MAP[config.architecture] = type("EngineChecks", (EngineChecks,), checks)
        ModelRegistry.register_model(config.architecture, f"ssm_surgery_vllm.model:{config.architecture}")
