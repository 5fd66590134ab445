"""Softmax attention by the implementation that the config selects, and the kernels that it runs.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only.

Shape legend: B batch, T new tokens, S tokens in the cache and new ones, H heads, G key/value heads, K query/key width,
V value width.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def is_decoding(x_BTD: Tensor) -> bool:
    """Return whether this is one new token without gradients: what counts then is the number of operators."""
    return x_BTD.shape[1] == 1 and not torch.is_grad_enabled()


def is_plain(module: nn.Module) -> bool:
    """Return whether nothing waits for a call of the module: no hook, and no other `forward` than its class's."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def projected(linear: nn.Module, x_BTC: Tensor, onto_BTD: Tensor | None) -> Tensor:
    """Return `onto_BTD + linear(x_BTC)`; in one operator where `linear` is as torch has it, without a bias."""
    if onto_BTD is None:
        return linear(x_BTC)
    takes_part = type(linear) is nn.Linear and linear.bias is None and type(linear.weight) is nn.Parameter
    if takes_part and is_plain(linear) and x_BTC.dtype == onto_BTD.dtype == linear.weight.dtype:
        return torch.addmm(onto_BTD.flatten(0, 1), x_BTC.flatten(0, 1), linear.weight.t()).view(onto_BTD.shape)
    return onto_BTD + linear(x_BTC)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Mix values: (B,H,T,K), (B,G,S,K), (B,G,S,V) -> (B,T,H,V), and the weights (B,H,T,S) of eager attention.

    Args:
        module: has the `config` that selects the implementation, `num_key_value_groups` and `is_causal`.
        mask: as made by transformers' `create_causal_mask`; None where every query sees itself and what is before it.
        scaling: factor of the scores.
    """
    implementation, value_width = module.config._attn_implementation, value.shape[-1]
    function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
    if query.shape[2] == 1 and function in (sdpa_attention_forward, eager_attention_forward):
        return _attend_once(query, key, value, mask, scaling, fused=function is sdpa_attention_forward)
    if "flash" in implementation or (implementation == "sdpa" and query.shape[2] > 1):
        # Fused kernels take keys and values of one width. Zeros change no score; the output is cropped.
        width = max(key.shape[-1], value_width)
        query, key, value = (F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    with without_cudnn() if function is sdpa_attention_forward and query.is_cuda else nullcontext():
        mixed_BTHV, weights = function(module, query, key, value, mask, scaling=scaling, dropout=0.0)
    return mixed_BTHV[..., :value_width], weights


def _attend_once(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, fused: bool
) -> tuple[Tensor, Tensor | None]:
    """Attend with one query a head. Queries that share keys are the rows of one product.

    Args:
        fused: whether one operator may do it, which returns no weights. On a CPU it takes keys and values of one width.
            On a GPU, choosing a kernel takes longer than the two more operators.
    """
    (B, H, _, K), G, V = query.shape, key.shape[1], value.shape[-1]
    query_BGRK = query.reshape(B, G, H // G, K)
    if fused and mask is None and query.is_cpu and K == V:
        return F.scaled_dot_product_attention(query_BGRK, key, value, scale=scaling).reshape(B, 1, H, V), None
    scores_BGRS = (query_BGRK if scaling == 1.0 else query_BGRK * scaling) @ key.transpose(2, 3)
    if mask is not None:
        mask = mask if mask.shape[1] == 1 else mask.reshape(B, G, H // G, -1)
        if mask.dtype == torch.bool:
            scores_BGRS = torch.where(mask, scores_BGRS, torch.finfo(scores_BGRS.dtype).min)
        else:
            scores_BGRS = scores_BGRS + mask
    weights_BGRS = scores_BGRS.softmax(-1).to(query.dtype)  # computed in fp32 whatever the dtype
    return (weights_BGRS @ value).reshape(B, 1, H, V), weights_BGRS.reshape(B, H, 1, -1)


def without_cudnn() -> AbstractContextManager[None]:
    """Leave out the backend that makes a plan for every length, which takes longer than the attention.

    The choice among the others stays the user's, and so does cuDNN where it is the only one.
    """
    others = _other_backends()
    return sdpa_kernel(others) if others else nullcontext()


@torch.compiler.assume_constant_result
def _other_backends() -> list[SDPBackend]:
    cuda = torch.backends.cuda
    enabled = {
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: cuda.math_sdp_enabled(),
    }
    return [backend for backend, is_on in enabled.items() if is_on]


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Softmax attention in plain torch: (B,H,T,K), (B,G,S,K), (B,G,S,V) -> (B,T,H,V) and the weights (B,H,T,S)."""
    if module.num_key_value_groups > 1:
        key, value = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2), weights
