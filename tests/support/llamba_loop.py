"""A tiny Llamba, and the model a second time: in fp64, a token and a head at a time, from the tensors' names alone.

It shares no code with the package, nor with transformers. FORMATS: rows of `in_proj` are [x | B | C | z | a].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surgery.hybrid import LlambaConfig, LlambaForCausalLM
from tests.support.pico import HEADS, HIDDEN, pico_family, pico_family_config

HEAD_DIM = HIDDEN // HEADS
Weights = dict[str, Tensor]


def _fields(n_qk_heads: int = 2, ssm: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A head of its own; `ssm` changes single fields of `ssm_cfg`."""
    ssm_cfg = {**pico_family_config("llamba").ssm_cfg, "n_qk_heads": n_qk_heads, **(ssm or {})}
    return {"ssm_cfg": ssm_cfg, "tie_embeddings": False, **more}


def llamba_config(**config: Any) -> LlambaConfig:
    return pico_family_config("llamba", **_fields(**config))


def llamba(**config: Any) -> LlambaForCausalLM:
    return pico_family("llamba", **_fields(**config))


def loop_logits(model: LlambaForCausalLM, ids: Tensor) -> Tensor:
    """(B,T) -> (B,T,V), each row by itself."""
    weights = {name: value.detach().double() for name, value in model.state_dict().items()}
    return torch.stack([_row_logits(weights, model.config, row) for row in ids])


def _row_logits(weights: Weights, config: LlambaConfig, ids_T: Tensor) -> Tensor:
    hidden = weights["backbone.embedding.weight"][ids_T]
    for layer in range(config.n_layer):
        own = part(weights, f"backbone.layers.{layer}.")
        hidden = hidden + loop_mixer(part(own, "mixer."), config.ssm_cfg, _norm(hidden, own["input_layernorm.weight"]))
        inside = _norm(hidden, own["post_attention_layernorm.weight"])
        gate, up = (_linear(part(own, f"mlp.{name}_proj."), inside) for name in ("gate", "up"))
        hidden = hidden + _linear(part(own, "mlp.down_proj."), gate / (1 + torch.exp(-gate)) * up)
    hidden = _norm(hidden, weights["backbone.final_layernorm.weight"], config.norm_epsilon)
    head = weights.get("lm_head.weight", weights["backbone.embedding.weight"])
    return hidden @ head.T + weights.get("lm_head.bias", torch.zeros(1, dtype=torch.double))


def loop_mixer(weights: Weights, ssm: dict[str, Any], u_TD: Tensor) -> Tensor:
    """(T,D) -> (T,D)."""
    H, G, N = ssm["n_v_heads"], ssm["n_qk_heads"], ssm["d_state"]
    inner = ssm["expand"] * u_TD.shape[1]
    mixed, z, a = _linear(part(weights, "in_proj."), u_TD).split([inner + 2 * G * N, inner, H], dim=1)
    taps = weights["conv1d.weight"][:, 0].unbind(1)[::-1]
    seen = [sum(taps[j] * mixed[t - j] for j in range(min(t + 1, len(taps)))) for t in range(len(mixed))]
    mixed = torch.stack(seen) + weights.get("conv1d.bias", torch.zeros(1, dtype=u_TD.dtype))
    if ssm["activation"] == "silu":
        mixed = mixed / (1 + torch.exp(-mixed))
    x, B, C = mixed.split([inner, G * N, G * N], dim=1)
    P = inner // H
    states, out = [u_TD.new_zeros(P, N) for _ in range(H)], []
    for t in range(len(u_TD)):
        for h in range(H):
            g = h // (H // G)
            x_P, B_N, C_N = x[t, h * P : (h + 1) * P], B[t, g * N : (g + 1) * N], C[t, g * N : (g + 1) * N]
            states[h] = states[h] / (1 + torch.exp(a[t, h])) + torch.outer(x_P, B_N)  # exp(-softplus(a))
            out.append(states[h] @ C_N + weights["D"][h] * x_P)
    z = z + weights.get("z_bias", torch.zeros(1, dtype=u_TD.dtype))
    y = torch.stack(out).view(len(u_TD), inner) * z / (1 + torch.exp(-z))
    return _linear(part(weights, "out_proj."), y)


def part(weights: Weights, prefix: str) -> Weights:
    """The tensors under a prefix."""
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def _linear(weights: Weights, x: Tensor) -> Tensor:
    return x @ weights["weight"].T + weights.get("bias", torch.zeros(1, dtype=x.dtype))


def _norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


@torch.no_grad()
def full(model: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    return model(ids, attention_mask=mask, use_cache=False).logits
