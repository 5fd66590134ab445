"""Read the shape and the weights of a Transformer's attention, to transplant it.

Donors are the families with `is_donor`: Llama, Qwen2 and GPT-NeoX (Pythia).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from surgery.errors import PlanError
from surgery.models.registry import families
from surgery.types import MixerSpec


def donor_mixers(config: PreTrainedConfig) -> tuple[MixerSpec, ...]:
    """Return the attention mixers of a donor. Raises PlanError if its attention cannot be transplanted."""
    donors = [family for family in families() if family.is_donor]
    for family in donors:
        if config.model_type in family.model_types:
            return family.mixers(config)
    known = ", ".join(model_type for family in donors for model_type in family.model_types)
    hint = f"Only attention of these model types can be copied or compared: {known}. Use a model of one of them."
    raise PlanError("splice.teacher.model", config.model_type, hint)


def donor_fields(config: PreTrainedConfig, spec: MixerSpec, heads: Sequence[int] | None) -> dict[str, Any]:
    """Return the fields of `config.splice` for a branch with the donor's attention.

    Args:
        config: config of the donor.
        spec: the donor's mixer.
        heads: heads to take, each with its own key/value head; None for the whole layer.

    Raises:
        PlanError: the layer has a sliding window, which no branch has.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[spec.layer] == "sliding_attention":
        hint = "A branch reads the whole text. Choose layers with full attention, or another teacher."
        raise PlanError("splice.teacher", f"layer {spec.layer}: sliding window of {config.sliding_window} tokens", hint)
    rope = dict(config.rope_parameters)
    share = rope.pop("partial_rotary_factor", 1.0)
    neox = spec.kind == "neox_attention"
    bias = bool(getattr(config, "attention_bias", False)) or config.model_type == "qwen2"
    return {
        "qk_width": spec.head_dim,
        "v_width": spec.head_dim,
        "kv_heads": spec.num_groups if heads is None else len(heads),
        "conv_kernel": 0,
        "activation": None,
        "gate": False,
        "bias": bias,
        "out_bias": heads is None and bool(getattr(config, "attention_bias", False)),
        "rope": {
            "dim": int(spec.head_dim * share) if neox else spec.head_dim,
            "parameters": rope,
            "max_position_embeddings": config.max_position_embeddings,
        },
    }


def donor_weights(model: PreTrainedModel, spec: MixerSpec, heads: Sequence[int] | None) -> dict[str, Tensor]:
    """Return weights and biases under the names of `DonorAttention`, in the order of `heads`."""
    mixer = model.get_submodule(spec.path)
    queries = list(range(spec.num_heads)) if heads is None else list(heads)
    groups = list(range(spec.num_groups)) if heads is None else [spec.group_of(head) for head in queries]
    out = mixer.dense if spec.kind == "neox_attention" else mixer.o_proj
    columns = [out.weight.unflatten(1, (spec.num_heads, -1))[:, head] for head in queries]
    weights = {"o_proj.weight": torch.cat(columns, dim=1)}
    if heads is None and out.bias is not None:
        weights["o_proj.bias"] = out.bias
    for part, rows in (("q", queries), ("k", groups), ("v", groups)):
        for name, tensor in _rows(mixer, spec, part).items():
            weights[f"{part}_proj.{name}"] = torch.cat([tensor[row] for row in rows])
    return weights


def _rows(mixer: nn.Module, spec: MixerSpec, part: str) -> dict[str, Tensor]:
    """Return `weight` (heads,K,D) and `bias` (heads,K) of the query, key or value projection."""
    if spec.kind == "neox_attention":  # one matrix: query, key and value of each head in turn
        place = "qkv".index(part)
        packed = mixer.query_key_value
        return {n: p.unflatten(0, (spec.num_heads, 3, -1))[:, place] for n, p in packed.named_parameters()}
    linear = mixer.get_submodule(f"{part}_proj")
    return {name: p.unflatten(0, (-1, spec.head_dim)) for name, p in linear.named_parameters()}
