"""Count a model's parameters, and the bytes of its state and KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from surgery.errors import reading
from surgery.models.cache import cache_of_one_token
from surgery.models.inserted import new_modules
from surgery.models.torch_scans import choose_by_device

_ITEM = 4  # bytes of a cached value


@dataclass(frozen=True)
class Sizes:
    """Counts of parameters, and bytes of the cache of one sequence.

    Attributes:
        parameters: number of parameters. Tied ones count once.
        new_parameters: number of parameters in spliced heads and inserted layers.
        state_bytes: convolution and recurrent states, including the convolution states of spliced heads. Independent of
            length.
        kv_bytes_per_token: keys and values of one token, in the spliced layers and in the model's own attention.
    """

    parameters: int
    new_parameters: int
    state_bytes: int
    kv_bytes_per_token: int

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes of keys and values after `tokens` tokens."""
        return self.kv_bytes_per_token * tokens


def meta_model(config: PreTrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """Build a model at its true size on the meta device, without memory for its weights.

    Raises:
        ModelError: no model can be built from this config.
    """
    hint = "No model can be built from its config.json. Correct it."
    with reading("base.model", config.name_or_path or config.model_type, hint), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    choose_by_device(model)
    return model


def sizes_of(model: PreTrainedModel) -> Sizes:
    """Count parameters, and the bytes of the cache by a pass over one token; possibly on the meta device."""
    new = sum(p.numel() for module in new_modules(model).values() for p in module.parameters())
    states, per_token = (_ITEM * sum(t.numel() for t in tensors) for tensors in cache_of_one_token(model))
    return Sizes(
        parameters=model.num_parameters(),
        new_parameters=new,
        state_bytes=states,
        kv_bytes_per_token=per_token,
    )
