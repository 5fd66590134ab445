"""Run the kernels of mamba_ssm and causal_conv1d on CUDA tensors only.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only.

A modelling file of transformers has a function for each scan and convolution, and takes the kernel for it whenever the
package can be imported. The kernels refuse tensors that are not on a CUDA device: a model on a CPU would not run on a
machine that has the packages.

Shape legend: B rows, T tokens.
"""

import sys
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

logger = logging.get_logger(__name__)

_CONVOLUTION = ("causal_conv1d",)
_FUSED = ("mamba_ssm.ops.triton.ssd_combined", "causal_conv1d")
_FUSED_MAMBA1 = ("mamba_ssm.ops.selective_scan_interface", "causal_conv1d")
# The functions of the modelling files, and what the kernel of each imports. mamba_ssm does not require causal_conv1d,
# but its fused training functions call it.
KERNELS = {
    "causal_conv1d_fn": _CONVOLUTION,
    "causal_conv1d_update": _CONVOLUTION,
    "mamba2_split_conv1d_scan_combined": _FUSED,
    "mamba2_chunk_scan": _FUSED[:1],
    "mamba2_selective_state_update": ("mamba_ssm.ops.triton.selective_state_update",),
    "mamba_inner_fn": _FUSED_MAMBA1,
    "mamba_selective_scan": _FUSED_MAMBA1[:1],
    "mamba_selective_state_update": ("mamba_ssm.ops.triton.selective_state_update",),
}
INSTALL = {
    "mamba_ssm": "pip install --no-build-isolation mamba-ssm",
    "causal_conv1d": "pip install --no-build-isolation causal-conv1d",
}
# Tokens in a chunk of the PyTorch scan of Mamba-2, at most. It makes a tensor of tokens x chunk x heads x state: 800 MB
# a layer and prompt at the shape of mamba2-130m in the published chunks of 256. The result is the same up to rounding.
TORCH_CHUNK = 32


@cache
def missing_kernel(name: str) -> str | None:
    """Return why a function has no kernel, and what to install, in one line; None if it has one.

    Args:
        name: a key of `KERNELS`.
    """
    for module in KERNELS[name]:
        package = module.partition(".")[0]
        try:
            import_module(module)
        except Exception as error:  # a package that was built for another torch raises any
            if find_spec(package) is None:
                return f"{package} is not installed: {INSTALL[package]}"
            reason = " ".join(str(error).split())[:120]
            again = INSTALL[package].replace("install", "install --force-reinstall --no-deps", 1)
            return f"{package} cannot be imported ({type(error).__name__}: {reason}): {again}"
    return None


def kernels_by_device(*classes: type) -> list[ModuleType]:
    """Choose by device in the modelling files of these classes: kernels for CUDA tensors, PyTorch for all others.

    It replaces functions of transformers, once, so it holds for other models of the same files too.

    Returns:
        The modelling files, in order of their names.
    """
    files = {base.__module__ for cls in classes for base in cls.__mro__}
    modules = [sys.modules[file] for file in sorted(files) if file in sys.modules]
    for module in modules:
        for name in KERNELS:
            function: Any = getattr(module, name, None)
            code = _torch_code(function)
            if code is not None and not hasattr(function, "has_kernel"):
                setattr(module, name, _by_device(name, function, code))
    return modules


def keeps_documents_apart(model: type, on_cuda: bool) -> bool:
    """Return whether the scan and the convolution of a model's files take `seq_idx` on a device."""
    files = [sys.modules[base.__module__] for base in model.__mro__]
    names = ("causal_conv1d_fn", "mamba2_chunk_scan")
    functions = [getattr(file, name) for file in files if hasattr(file, names[1]) for name in names]
    # What replaces a function that was chosen by device, as this library's scans do, takes it on every device.
    return bool(functions) and all(on_cuda and f.has_kernel if hasattr(f, "has_kernel") else True for f in functions)


def _torch_code(function: Any) -> Callable[..., Any] | None:
    """Return the PyTorch code below a function that transformers has wrapped; None for any other function."""
    if isinstance(function, nn.Module):  # with the package `kernels`, the wrapper is inside the forward of a module
        cells = type(function).forward.__closure__ or ()
        function = next((cell.cell_contents for cell in cells if hasattr(cell.cell_contents, "__wrapped__")), None)
    return getattr(function, "__wrapped__", None)


def _by_device(name: str, function: Callable[..., Any], code: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that takes transformers' choice for CUDA tensors, and PyTorch for all others."""
    known = frozenset(signature(code).parameters)
    missing = missing_kernel(name)
    fuses = KERNELS[name] in (_FUSED, _FUSED_MAMBA1)

    @wraps(code)
    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_cuda and (missing is None or _from_hub(function)):
            return function(tensor, *args, **kwargs)
        if fuses:
            return None  # as PyTorch's code: the mixer then calls its parts
        if kwargs.get("seq_idx") is not None:
            reason = missing if tensor.is_cuda else f"its kernel needs CUDA tensors, not {tensor.device.type}"
            raise ValueError(f"seq_idx: {name} can't keep packed sequences apart ({reason}). Give every text a row.")
        if tensor.is_cuda and not torch.compiler.is_compiling():
            logger.warning_once(f"{name}: PyTorch's code runs, which is slower than the kernel ({missing}).")
        if "chunk_size" in kwargs:
            kwargs["chunk_size"] = min(kwargs["chunk_size"], TORCH_CHUNK)
        return code(tensor, *args, **{key: value for key, value in kwargs.items() if key in known})

    call.has_kernel = missing is None  # type: ignore[attr-defined]
    return call


def _from_hub(function: Any) -> bool:
    """Return whether `use_kernels` has put a kernel of the Hub in place of the function's code."""
    return isinstance(function, nn.Module) and function.forward.__func__ is not type(function).forward
