"""A selective scan of Mamba-1 whose backward pass is linear in the number of tokens, for training without kernels.

transformers takes each token from tensors of all tokens by index. The gradient of such an index is a tensor as large as
all tokens, so its backward pass is quadratic. The results are the same; docs/BENCHMARKS.md has the times.

Shape legend: B batch, I inner width, T tokens, N state width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

Scan = Callable[..., Any]


def selective_scan(
    x_BIT: Tensor,
    dt_BIT: Tensor,
    A_IN: Tensor,
    B_BNT: Tensor,
    C_BNT: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the scan of arXiv 2312.00752 token by token, with the arguments of `mamba_ssm.selective_scan_fn`.

    Args:
        D: (I,), the skip. z: (B,I,T), the gate. delta_bias: (I,), added to dt before the softplus.

    Returns:
        (B,I,T), and with `return_last_state` the state (B,I,N) after the last token.
    """
    if delta_bias is not None:
        dt_BIT = dt_BIT + delta_bias.to(dt_BIT.dtype)[:, None]
    if delta_softplus:
        dt_BIT = F.softplus(dt_BIT)
    decays = torch.exp(A_IN[:, None] * dt_BIT[..., None]).unbind(2)
    keys_BTN = B_BNT.transpose(1, 2)[:, None].float()
    inputs = (dt_BIT[..., None] * keys_BTN * x_BIT[..., None].float()).unbind(2)
    state_BIN = torch.zeros_like(inputs[0], dtype=x_BIT.dtype)
    outputs = []
    for decay_BIN, input_BIN, query_BN in zip(decays, inputs, C_BNT.unbind(2), strict=True):
        state_BIN = decay_BIN * state_BIN + input_BIN
        outputs.append((state_BIN.to(x_BIT.dtype) @ query_BN[..., None]).squeeze(-1))
    y_BIT = torch.stack(outputs, dim=-1)
    if D is not None:
        y_BIT = y_BIT + x_BIT * D[:, None]
    if z is not None:
        y_BIT = y_BIT * F.silu(z)
    return (y_BIT, state_BIN) if return_last_state else y_BIT


@contextmanager
def linear_backward(model: PreTrainedModel) -> Iterator[None]:
    """Use this scan in `model` inside the context, unless a kernel or `torch.compile` has a faster one.

    It takes the place of transformers' function, so other Mamba-1 models that run inside the context use it too.
    """
    family = str(getattr(model.config, "model_type", "")).removesuffix("_hybrid")
    config_has_one = bool(getattr(model.config, "use_mambapy", False))
    if family not in ("mamba", "falcon_mamba") or config_has_one or find_spec("mamba_ssm") is not None:
        yield
        return
    module: Any = import_module(f"transformers.models.{family}.modeling_{family}")
    stock: Scan = module.mamba_selective_scan

    def scan(*given: Any, use_mambapy: bool = False, use_associative_scan: bool = False, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return stock(*given, use_mambapy=use_mambapy, use_associative_scan=use_associative_scan, **named)
        return selective_scan(*given, **named)

    module.mamba_selective_scan = scan
    try:
        yield
    finally:
        module.mamba_selective_scan = stock
