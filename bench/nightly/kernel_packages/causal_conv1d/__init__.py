"""Stands in for the package: its kernels take tensors on a CUDA device only.

Put the folder above on PYTHONPATH. Nothing that runs on a CPU or on the meta device may call a function here, so every
command gives the same results with this folder as without.
"""

from typing import Any

from torch import Tensor

__version__ = "1.6.0"


def refuse(name: str, *given: Any, **named: Any) -> None:
    """Raise the error of the real package, and name the device."""
    devices = {str(value.device) for value in (*given, *named.values()) if isinstance(value, Tensor)}
    raise RuntimeError(f"Expected x.is_cuda() to be true, but {name} got tensors on {', '.join(sorted(devices))}")


def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
                     final_states_out=None, activation=None):  # fmt: skip
    refuse("causal_conv1d_fn", x, weight)


def causal_conv1d_update(
    x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None
):
    refuse("causal_conv1d_update", x, conv_state)
