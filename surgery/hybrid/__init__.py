"""The hybrid classes. Importing this package registers them, so that checkpoints load without remote code."""

from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .modeling_bamba_hybrid import BambaHybridConfig, BambaHybridForCausalLM, BambaHybridModel
from .modeling_granite_hybrid import GraniteHybridConfig, GraniteHybridForCausalLM, GraniteHybridModel
from .modeling_llamba import LlambaConfig, LlambaForCausalLM, LlambaModel
from .modeling_mamba2_hybrid import Mamba2HybridConfig, Mamba2HybridForCausalLM, Mamba2HybridModel
from .modeling_mamba2attn import Mamba2AttnConfig, Mamba2AttnForCausalLM, Mamba2AttnModel
from .modeling_mamba_hybrid import (
    FalconMambaHybridConfig,
    FalconMambaHybridForCausalLM,
    FalconMambaHybridModel,
    MambaHybridConfig,
    MambaHybridForCausalLM,
    MambaHybridModel,
)
from .modeling_nemotron_h_hybrid import NemotronHHybridConfig, NemotronHHybridForCausalLM, NemotronHHybridModel
from .modeling_zamba2_hybrid import Zamba2HybridConfig, Zamba2HybridForCausalLM, Zamba2HybridModel

# Config, model and causal language model of every hybrid.
CLASSES: list[tuple[type[Any], type[Any], type[Any]]] = []


def register_classes(config: type[Any], model: type[Any], causal: type[Any]) -> None:
    """Register the classes of a hybrid with transformers' Auto classes. What is saved holds their modelling files, so
    that stock transformers loads it with `trust_remote_code`.
    """
    if (config, model, causal) not in CLASSES:
        CLASSES.append((config, model, causal))
    config.register_for_auto_class()
    model.register_for_auto_class("AutoModel")
    causal.register_for_auto_class("AutoModelForCausalLM")
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModel.register(config, model, exist_ok=True)
    AutoModelForCausalLM.register(config, causal, exist_ok=True)


register_classes(BambaHybridConfig, BambaHybridModel, BambaHybridForCausalLM)
register_classes(FalconMambaHybridConfig, FalconMambaHybridModel, FalconMambaHybridForCausalLM)
register_classes(GraniteHybridConfig, GraniteHybridModel, GraniteHybridForCausalLM)
register_classes(LlambaConfig, LlambaModel, LlambaForCausalLM)
register_classes(Mamba2AttnConfig, Mamba2AttnModel, Mamba2AttnForCausalLM)
register_classes(Mamba2HybridConfig, Mamba2HybridModel, Mamba2HybridForCausalLM)
register_classes(MambaHybridConfig, MambaHybridModel, MambaHybridForCausalLM)
register_classes(NemotronHHybridConfig, NemotronHHybridModel, NemotronHHybridForCausalLM)
register_classes(Zamba2HybridConfig, Zamba2HybridModel, Zamba2HybridForCausalLM)

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
    "register_classes",
]
