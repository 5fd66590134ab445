"""Count a model's parameters and the bytes of its state and KV cache, from the config alone.

Shape legend: I inner width, G groups, N state width, H heads, P head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from surgery.errors import reading
from surgery.hybrid.configuration_hybrid import BRANCHES, is_whole
from surgery.models.inserted import new_modules
from surgery.models.lookup import family_of, structure_of
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

    @property
    def base_parameters(self) -> int:
        """Number of parameters without spliced heads and inserted layers."""
        return self.parameters - self.new_parameters

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
    """Count parameters and cache bytes of a model, possibly on the meta device."""
    new = sum(p.numel() for module in new_modules(model).values() for p in module.parameters())
    splice: Sequence[dict[str, Any]] = getattr(model.config, "splice", None) or []
    return Sizes(
        parameters=sum(p.numel() for p in model.parameters()),
        new_parameters=new,
        state_bytes=state_bytes(model.config),
        kv_bytes_per_token=kv_bytes_per_token(splice) + own_kv_bytes_per_token(model.config),
    )


def kv_bytes_per_token(splice: Sequence[dict[str, Any]]) -> int:
    """Return the bytes that spliced heads cache per token. Replaced layers count as the model's own attention."""
    return _ITEM * sum(_numbers_per_token(site) for site in splice if not is_whole(site))


def own_kv_bytes_per_token(config: PreTrainedConfig) -> int:
    """Return the bytes that the model's own attention layers cache per token."""
    return _ITEM * sum(structure_of(spec).kv_numel(spec) for spec in family_of(config).mixers(config))


def state_bytes(config: PreTrainedConfig) -> int:
    """Return the bytes of convolution and recurrent states, including the convolution states of spliced heads."""
    total = sum(structure_of(spec).state_numel(spec) for spec in family_of(config).mixers(config))
    for site in getattr(config, "splice", None) or []:
        total += _numbers_of_state(site)
    return total * _ITEM


def _numbers_per_token(site: dict[str, Any]) -> int:
    """Count what the cache keeps of each token. A branch with another cache has the method `kv_numel(site)`."""
    own = getattr(BRANCHES[site["init"]], "kv_numel", None)
    return own(site) if own else len(site["heads"]) * (site["qk_width"] + site["v_width"])


def _numbers_of_state(site: dict[str, Any]) -> int:
    """Count the state of a branch's convolution. A branch with another state has the method `state_numel(site)`."""
    own = getattr(BRANCHES[site["init"]], "state_numel", None)
    return own(site) if own else len(site["heads"]) * (2 * site["qk_width"] + site["v_width"]) * site["conv_kernel"]
