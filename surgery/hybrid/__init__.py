"""The hybrid classes. Importing this package registers them, so that checkpoints load without remote code."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .modeling_bamba_hybrid import BambaHybridConfig, BambaHybridForCausalLM, BambaHybridModel
from .modeling_falcon_mamba_hybrid import FalconMambaHybridConfig, FalconMambaHybridForCausalLM, FalconMambaHybridModel
from .modeling_granite_hybrid import GraniteHybridConfig, GraniteHybridForCausalLM, GraniteHybridModel
from .modeling_llamba import LlambaConfig, LlambaForCausalLM, LlambaModel
from .modeling_mamba2_hybrid import Mamba2HybridConfig, Mamba2HybridForCausalLM, Mamba2HybridModel
from .modeling_mamba2attn import Mamba2AttnConfig, Mamba2AttnForCausalLM, Mamba2AttnModel
from .modeling_mamba_hybrid import MambaHybridConfig, MambaHybridForCausalLM, MambaHybridModel
from .modeling_nemotron_h_hybrid import NemotronHHybridConfig, NemotronHHybridForCausalLM, NemotronHHybridModel
from .modeling_zamba2_hybrid import Zamba2HybridConfig, Zamba2HybridForCausalLM, Zamba2HybridModel

CLASSES = (
    (BambaHybridConfig, BambaHybridModel, BambaHybridForCausalLM),
    (FalconMambaHybridConfig, FalconMambaHybridModel, FalconMambaHybridForCausalLM),
    (GraniteHybridConfig, GraniteHybridModel, GraniteHybridForCausalLM),
    (LlambaConfig, LlambaModel, LlambaForCausalLM),
    (Mamba2AttnConfig, Mamba2AttnModel, Mamba2AttnForCausalLM),
    (Mamba2HybridConfig, Mamba2HybridModel, Mamba2HybridForCausalLM),
    (MambaHybridConfig, MambaHybridModel, MambaHybridForCausalLM),
    (NemotronHHybridConfig, NemotronHHybridModel, NemotronHHybridForCausalLM),
    (Zamba2HybridConfig, Zamba2HybridModel, Zamba2HybridForCausalLM),
)
for _config, _model, _causal in CLASSES:
    # The modelling files travel with what is saved, so that stock transformers loads it with trust_remote_code.
    _config.register_for_auto_class()
    _model.register_for_auto_class("AutoModel")
    _causal.register_for_auto_class("AutoModelForCausalLM")
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)
    AutoModelForCausalLM.register(_config, _causal, exist_ok=True)

__all__ = [
    "CLASSES",
    "BambaHybridConfig",
    "BambaHybridForCausalLM",
    "BambaHybridModel",
    "FalconMambaHybridConfig",
    "FalconMambaHybridForCausalLM",
    "FalconMambaHybridModel",
    "GraniteHybridConfig",
    "GraniteHybridForCausalLM",
    "GraniteHybridModel",
    "LlambaConfig",
    "LlambaForCausalLM",
    "LlambaModel",
    "Mamba2AttnConfig",
    "Mamba2AttnForCausalLM",
    "Mamba2AttnModel",
    "Mamba2HybridConfig",
    "Mamba2HybridForCausalLM",
    "Mamba2HybridModel",
    "MambaHybridConfig",
    "MambaHybridForCausalLM",
    "MambaHybridModel",
    "NemotronHHybridConfig",
    "NemotronHHybridForCausalLM",
    "NemotronHHybridModel",
    "Zamba2HybridConfig",
    "Zamba2HybridForCausalLM",
    "Zamba2HybridModel",
]
