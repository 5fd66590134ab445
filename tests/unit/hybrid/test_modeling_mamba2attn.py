"""mamba_ssm's attention layers and MLPs, against plain loops in fp64 written from its semantics."""

from __future__ import annotations

import cmath
import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from surgery.hybrid.modeling_mamba2attn import Mamba2AttnForCausalLM, MambaSsmAttention
from tests.support.cases import each
from tests.support.mamba2attn import CASES, attn_model
from tests.support.pico import tokens


def naive_rotate(x_TP: Tensor, width: int, base: float, interleaved: bool) -> Tensor:
    """Pairs of coordinates are complex numbers that turn with the position."""
    turned = x_TP.clone()
    for t in range(len(x_TP)):
        for i in range(width // 2):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + width // 2)
            number = complex(x_TP[t, a], x_TP[t, b]) * cmath.exp(1j * t * base ** (-2 * i / width))
            turned[t, a], turned[t, b] = number.real, number.imag
    return turned


def naive_conv(x_TC: Tensor, weight_C1K: Tensor, bias_C: Tensor) -> Tensor:
    """Causal convolution of every channel by itself."""
    K, out = weight_C1K.shape[-1], bias_C.expand(len(x_TC), -1).clone()
    for t in range(len(x_TC)):
        for k in range(K):
            if t - (K - 1) + k >= 0:
                out[t] += weight_C1K[:, 0, k] * x_TC[t - (K - 1) + k]
    return out


def naive_attention(u_TD: Tensor, w: dict[str, Tensor], cfg: dict[str, Any]) -> Tensor:
    """One layer on one unpadded sequence, token by token and head by head."""
    H, G = cfg["num_heads"], cfg.get("num_heads_kv") or cfg["num_heads"]
    P = cfg.get("head_dim") or u_TD.shape[1] // H
    qkv = u_TD @ w["in_proj.weight"].T + w.get("in_proj.bias", 0)
    if cfg.get("d_conv"):
        qkv = naive_conv(qkv, w["conv1d.weight"], w["conv1d.bias"])
    rotary = (cfg.get("rotary_emb_dim", 0), cfg.get("rotary_emb_base", 1e4), cfg.get("rotary_emb_interleaved", False))
    scale = cfg.get("softmax_scale") or P**-0.5
    mixed = torch.zeros(len(u_TD), H * P, dtype=u_TD.dtype)
    for h in range(H):
        g = h // (H // G)
        q = naive_rotate(qkv[:, h * P : (h + 1) * P], *rotary)
        k = naive_rotate(qkv[:, (H + g) * P : (H + g + 1) * P], *rotary)
        v = qkv[:, (H + G + g) * P : (H + G + g + 1) * P]
        for t in range(len(u_TD)):
            weights = torch.softmax(scale * (k[: t + 1] @ q[t]), dim=0)
            mixed[t, h * P : (h + 1) * P] = weights @ v[: t + 1]
    return mixed @ w["out_proj.weight"].T + w.get("out_proj.bias", 0)


def naive_model(ids_T: Tensor, model: Mamba2AttnForCausalLM) -> Tensor:
    """(T,) -> logits (T,V) in fp64."""
    model = copy.deepcopy(model).double()
    c, w = model.config, model.state_dict()

    def part(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): tensor for name, tensor in w.items() if name.startswith(prefix)}

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + c.layer_norm_epsilon).sqrt() * weight

    hidden = w["backbone.embeddings.weight"][ids_T]
    for i in range(c.num_hidden_layers):
        at = f"backbone.layers.{i}."
        u, mixer = norm(hidden, w[at + "norm.weight"]), part(at + "mixer.")
        is_attention = i in c.attn_layer_idx  # the others are transformers' own Mamba-2
        mixed = naive_attention(u, mixer, c.attn_cfg) if is_attention else model.backbone.layers[i].mixer(u[None])[0]
        hidden = hidden + mixed
        if c.d_intermediate:
            value, gate = (norm(hidden, w[at + "norm2.weight"]) @ w[at + "mlp.fc1.weight"].T).chunk(2, dim=-1)
            hidden = hidden + (value * F.silu(gate)) @ w[at + "mlp.fc2.weight"].T
    return norm(hidden, w["backbone.norm_f.weight"]) @ w["lm_head.weight"].T


def assert_close(found: Tensor, expected: Tensor, atol: float = 3e-5) -> None:
    torch.testing.assert_close(found.double(), expected.double(), atol=atol, rtol=0)


@each("case", list(CASES))
@torch.no_grad()
def test_the_layer_is_mamba_ssms(case: str) -> None:
    model = attn_model(case).double()
    layer = model.backbone.layers[0].mixer
    assert isinstance(layer, MambaSsmAttention)
    u_BTD = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.stack([naive_attention(u, layer.state_dict(), model.config.attn_cfg) for u in u_BTD])
    assert_close(layer(u_BTD), expected, atol=1e-12)
    cache = DynamicCache(config=model.config)
    steps = [layer(u_BTD[:, t : t + 1], cache=cache) for t in range(9)]
    assert_close(torch.cat(steps, dim=1), expected, atol=1e-12)


@each("case", list(CASES))
@torch.no_grad()
def test_the_model_is_mamba_ssms(case: str) -> None:
    model = attn_model(case)
    ids = tokens(1, 11)
    assert_close(model(ids).logits[0], naive_model(ids[0], model))
