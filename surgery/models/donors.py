"""What a Transformer gives to a splice: its attention's shape, from the config, and its weights.

Must never know: where they go. Donors are Llama, Qwen2 and GPT-NeoX (Pythia), which families describe as attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from surgery.errors import PlanError
from surgery.models.registry import FAMILIES
from surgery.types import MixerSpec

DONORS = ("transformer", "gpt_neox")


def donor_mixers(config: PreTrainedConfig) -> tuple[MixerSpec, ...]:
    """The attention of a donor, by layer. Raises PlanError when the model cannot be one."""
    for family in FAMILIES:
        if family.name in DONORS and config.model_type in family.model_types:
            return family.mixers(config)
    known = ", ".join(t for f in FAMILIES if f.name in DONORS for t in f.model_types)
    raise PlanError("splice.teacher.model", config.model_type, f"A donor of attention is one of {known}.")


def donor_fields(config: PreTrainedConfig, spec: MixerSpec, heads: Sequence[int] | None) -> dict[str, Any]:
    """Entries of `config.splice` for a branch with the donor's attention.

    Args:
        heads: some of its heads, keys and values expanded for each of them; None takes the layer as it is.
    """
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
    """Weights and biases under the names of `hybrid.donor.DonorAttention`; rows in the order of `heads`."""
    mixer = model.get_submodule(spec.path)
    queries = list(range(spec.num_heads)) if heads is None else list(heads)
    groups = list(range(spec.num_groups)) if heads is None else [spec.group_of(head) for head in queries]
    out = mixer.dense if spec.kind == "neox_attention" else mixer.o_proj
    columns = [out.weight.unflatten(1, (spec.num_heads, -1))[:, head] for head in queries]
    found = {"o_proj.weight": torch.cat(columns, dim=1)}
    if heads is None and out.bias is not None:
        found["o_proj.bias"] = out.bias
    for part, rows in (("q", queries), ("k", groups), ("v", groups)):
        for name, tensor in _rows(mixer, spec, part).items():
            found[f"{part}_proj.{name}"] = torch.cat([tensor[row] for row in rows])
    return found


def _rows(mixer: nn.Module, spec: MixerSpec, part: str) -> dict[str, Tensor]:
    """`weight` (heads,K,D) and `bias` (heads,K) of the query, key or value projection."""
    if spec.kind == "neox_attention":  # packed: query, key and value of one head after another
        place = "qkv".index(part)
        packed = mixer.query_key_value
        return {n: p.unflatten(0, (spec.num_heads, 3, -1))[:, place] for n, p in packed.named_parameters()}
    linear = mixer.get_submodule(f"{part}_proj")
    return {name: p.unflatten(0, (-1, spec.head_dim)) for name, p in linear.named_parameters()}
