"""Kernels run for CUDA tensors only, and what is missing is named in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations import hub_kernels
from transformers.models.mamba import modeling_mamba

from surgery.hybrid.modeling_hybrid import KERNELS, TORCH_CHUNK, has_kernel, kernels_by_device
from surgery.models import torch_scans
from surgery.models.torch_scans import choose_by_device, missing_kernel
from tests.support.cases import each
from tests.support.kernels import OnCuda
from tests.support.pico import pico_family, tokens

PACKAGES = {name.partition(".")[0]: set[str]() for modules in KERNELS.values() for name in modules}
for _module in {name for modules in KERNELS.values() for name in modules}:
    PACKAGES[_module.partition(".")[0]].add(_module)
CHUNKS = {"mamba2": "chunk_size", "zamba2": "chunk_size", "bamba": "mamba_chunk_size", "falcon_h1": "mamba_chunk_size"}


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts modules of these names where the packages would be. A broken one raises when it is imported."""

    def install(*names: str, broken: str = "") -> None:
        for name, parts in PACKAGES.items():
            for module in {name, *parts}:
                monkeypatch.setitem(sys.modules, module, ModuleType(module) if name in names else None)
        if broken:
            monkeypatch.setattr(torch_scans, "find_spec", lambda name: name == broken)
        forget()

    def forget() -> None:
        missing_kernel.cache_clear()
        has_kernel.cache_clear()

    yield install
    forget()


def wrapped(code: Callable[..., Any]) -> Callable[..., Any]:
    """As transformers' decorator where the package is installed."""

    def kernel(*_: Any, **__: Any) -> str:
        return "kernel"

    kernel.__wrapped__ = code  # type: ignore[attr-defined]
    return kernel


def chosen(name: str, code: Callable[..., Any], function: Any = None) -> Callable[..., Any]:
    """What takes the place of the function `name` in a modelling file."""
    file = ModuleType("a_modelling_file")
    setattr(file, name, function or wrapped(code))
    sys.modules[file.__name__] = file
    try:
        kernels_by_device(type("Mixer", (), {"__module__": file.__name__}))
    finally:
        del sys.modules[file.__name__]
    return getattr(file, name)


@each("name", list(KERNELS))
@each("device", ["cpu", "meta"])
def test_no_kernel_gets_a_tensor_that_is_not_on_a_cuda_device(
    name: str, device: str, packages: Callable[..., None]
) -> None:
    packages(*PACKAGES)
    fuses = len(KERNELS[name]) == 2
    function = chosen(name, lambda x, weight: weight)
    assert function(torch.ones(2, device=device), weight=3, of_kernels_only=True) == (None if fuses else 3)
    assert function(torch.ones(2).as_subclass(OnCuda), weight=3, of_kernels_only=True) == "kernel"


def test_the_fused_function_needs_both_packages(packages: Callable[..., None]) -> None:
    """mamba_ssm's calls causal_conv1d, which it does not require."""
    for there, on_cuda in ((("mamba_ssm",), None), (("causal_conv1d",), None), (PACKAGES, "kernel")):
        packages(*there)
        function = chosen("mamba2_split_conv1d_scan_combined", lambda x: None)
        assert function(torch.ones(2).as_subclass(OnCuda)) is on_cuda, there


def test_packed_documents_are_refused_where_pytorchs_code_runs(packages: Callable[..., None]) -> None:
    """On a CUDA device transformers refuses them, and says what to install."""
    packages()
    with pytest.raises(ValueError, match=r"seq_idx: causal_conv1d_fn can't keep .*needs CUDA tensors, not cpu"):
        chosen("causal_conv1d_fn", lambda x, **_: x)(torch.ones(2), seq_idx=torch.zeros(2))
    code = hub_kernels.use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", "causal_conv1d")(lambda x, **_: x)
    with pytest.raises(ValueError, match="can't keep packed sequences apart without"):
        chosen("causal_conv1d_fn", print, code)(torch.ones(2).as_subclass(OnCuda), seq_idx=torch.zeros(2))


def test_a_package_that_cannot_be_imported_is_named_with_the_command(packages: Callable[..., None]) -> None:
    packages("causal_conv1d", broken="mamba_ssm")
    said = missing_kernel("mamba2_chunk_scan")
    assert said is not None and "\n" not in said
    assert said.startswith("mamba_ssm cannot be imported (") and "pip install --force-reinstall" in said
    assert missing_kernel("causal_conv1d_fn") is None


def test_a_plain_model_and_one_without_a_hybrid_class_are_covered() -> None:
    files = {file.__name__ for file in choose_by_device(pico_family("falcon_h1"), pico_family("mamba"))}
    assert modeling_mamba.__name__ in files and hasattr(modeling_mamba.mamba_inner_fn, "has_kernel")
    file = sys.modules["transformers.models.falcon_h1.modeling_falcon_h1"]
    assert hasattr(file.mamba2_chunk_scan, "has_kernel")


@torch.no_grad()
@each("name", list(CHUNKS))
def test_the_published_chunk_changes_neither_bits_nor_memory(name: str) -> None:
    """PyTorch's scan takes chunks of at most 32 tokens; the config stays."""
    found, field = list[Tensor](), CHUNKS[name]
    for chunk in (TORCH_CHUNK, 256):
        model = pico_family(name, **{field: chunk})
        choose_by_device(model)
        found.append(model(tokens(2, 50), use_cache=False).logits)
        assert getattr(model.config, field) == chunk
    assert torch.equal(*found)


class FromHub(nn.Module):
    """As a function that the package `kernels` has wrapped in a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        type(self).forward = lambda _, *given, **named: function(*given, **named)  # type: ignore[method-assign]


@each("replaced", [False, True])
def test_a_kernel_of_the_hub_runs_on_cuda_tensors_only(replaced: bool, packages: Callable[..., None]) -> None:
    """`kernelize` sets the forward of the module that stands for the function."""
    packages()
    module = FromHub(wrapped(lambda x: "PyTorch"))
    function = chosen("causal_conv1d_fn", print, module)
    if replaced:
        module.forward = (lambda _, x: "Hub").__get__(module)  # type: ignore[method-assign]
    found = [function(x) for x in (torch.ones(2), torch.ones(2).as_subclass(OnCuda))]
    assert found == ["PyTorch", "Hub" if replaced else "kernel"]
