"""A stand-in for bitsandbytes, for tests where it is not installed: linear layers of 15 levels for each row."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surgery.train import quantization

HAS_BITSANDBYTES = find_spec("bitsandbytes") is not None


class Linear4bit(nn.Linear):
    """As bitsandbytes': the weight is packed when the layer is moved to a device."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, compute_dtype: torch.dtype, **given: Any
    ) -> None:
        super().__init__(in_features, out_features, bias, device=given["device"])
        self.compute_dtype = compute_dtype
        assert given["compress_statistics"] and given["quant_type"] == "nf4"

    def to(self, *args: Any, **kwargs: Any) -> Any:
        weight = self.weight.detach()
        self.scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-9) / 7
        packed = ((weight / self.scale).round() + 8).to(torch.uint8).reshape(-1, 2)
        self.weight = nn.Parameter(packed[:, :1] * 16 + packed[:, 1:], requires_grad=False)
        return self

    def dequantized(self) -> Tensor:
        levels = torch.cat([self.weight // 16, self.weight % 16], dim=1).view(self.out_features, self.in_features)
        return (levels.float() - 8) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        weight = self.dequantized().to(self.compute_dtype)
        return nn.functional.linear(x.to(self.compute_dtype), weight, self.bias).to(x.dtype)


def _params(data: Tensor, **settings: Any) -> nn.Parameter:
    return nn.Parameter(data, requires_grad=False)


def install(patch: pytest.MonkeyPatch) -> None:
    """Put the stand-in in the place of bitsandbytes, unless that is installed."""
    if HAS_BITSANDBYTES:
        return
    layers = ModuleType("bitsandbytes.nn")
    layers.Linear4bit, layers.Params4bit = Linear4bit, _params  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "bitsandbytes.nn", layers)  # PEFT looks for the package, and must not find one
    patch.setattr(quantization, "version", lambda name: "stand-in")


def weight_of(layer: nn.Module) -> Tensor:
    """Return the weight that a layer of 4 bits computes with."""
    if isinstance(layer, Linear4bit):
        return layer.dequantized()
    from bitsandbytes.functional import dequantize_4bit

    result: Tensor = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return result
