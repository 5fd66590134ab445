"""The hybrid classes. Importing this package registers them, so that checkpoints load without remote code."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .modeling_mamba2_hybrid import Mamba2HybridConfig, Mamba2HybridForCausalLM, Mamba2HybridModel

for _config, _model, _causal in ((Mamba2HybridConfig, Mamba2HybridModel, Mamba2HybridForCausalLM),):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)
    AutoModelForCausalLM.register(_config, _causal, exist_ok=True)

__all__ = ["Mamba2HybridConfig", "Mamba2HybridForCausalLM", "Mamba2HybridModel"]
