"""What tests may expect of rounding, and a pytest plugin that rounds as another processor might.

A kernel chooses its order of summation by the shapes of its operands, the processor and the number of threads. The same
computation gives the same bits on one machine (`assert_same_bits`); a computation of another shape, order or thread
count agrees within a few units in the last place (`assert_close_in_ulps`).

`python -m pytest -p tests.support.rounding` moves some results of products, convolutions, reductions and softmaxes by
one unit in the last place, in a pattern that follows from the operator and the shapes of its operands. A test that
compares the bits of two different computations fails under it.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MOVED = """
    mm addmm bmm baddbmm linear mv dot convolution mkldnn_convolution sum mean cumsum exp rsqrt silu logsumexp _softmax
    _log_softmax native_layer_norm _fused_rms_norm _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_attention_math
"""
SHARE = 16  # one result in so many moves up, and one down


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """Both come from the same computation: same operators, shapes, order and threads."""
    torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)


def assert_close_in_ulps(found: Tensor, expected: Tensor, ulps: float = 8) -> None:
    """Both compute the same numbers in another order or shape; an ulp is one of the largest number's."""
    atol = ulps * torch.finfo(expected.dtype).eps * float(expected.abs().max())
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


class OtherRounding(TorchDispatchMode):
    """Moves some results of the operators in `MOVED`, in fp32 and fp64, by one unit in the last place."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in MOVED.split():
            return result
        shapes = [(tuple(x.shape), x.stride()) for x in args if isinstance(x, Tensor)]
        seed = int.from_bytes(hashlib.sha256(repr((str(func), shapes)).encode()).digest()[:6], "big")
        if isinstance(result, Tensor):
            return _moved(result, seed)
        first, *rest = result
        return (_moved(first, seed), *rest)


def _moved(x: Tensor, seed: int) -> Tensor:
    if type(x) is not Tensor or x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return x
    draw = torch.randint(0, SHARE, x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    toward = torch.where(draw == 0, torch.inf, torch.where(draw == 1, -torch.inf, x)).to(x.dtype)
    return torch.where(x == 0, x, torch.nextafter(x, toward))  # a zero is exact: masked, or a product with one


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[None]:
    """Every test, with its fixtures."""
    with OtherRounding():
        yield
