"""The scans in plain PyTorch compute what transformers' do, and take less."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2

from surgery.models import torch_scans as module_of_scans
from surgery.models.meters import Meter
from surgery.models.torch_scans import chunk_scan, code_text, packed_convolution, torch_scans
from tests.support.cases import each
from tests.support.kernels import OnCuda
from tests.support.pico import pico_family, tokens

MAMBA1 = ("mamba", "falcon_mamba")
MAMBA2 = ("mamba2", "nemotron_h", "bamba", "granite", "zamba2", "falcon_h1")


def loss_and_gradients(model: nn.Module, ids: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@each("name", MAMBA1 + MAMBA2)
def test_loss_and_gradients_are_those_of_transformers(name: str) -> None:
    model, ids = pico_family(name).train(), tokens(2, 20)
    stock = loss_and_gradients(model, ids)
    with torch_scans(model):
        ours = loss_and_gradients(model, ids)
    assert len(stock) == len(ours) > 10
    for want, got in zip(stock, ours, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)


@each("name", MAMBA1 + MAMBA2)
def test_a_prompt_and_more_tokens_after_it_are_those_of_transformers(name: str) -> None:
    """The state after a prompt is the same, and further tokens begin with it."""
    model, ids = pico_family(name), tokens(2, 19)
    passes = []
    for scans in (nullcontext(), torch_scans(model)):
        with torch.no_grad(), scans:
            passes.append(prompt_and_more(model, ids))
    torch.testing.assert_close(passes[1], passes[0], atol=1e-4, rtol=1e-4)


def prompt_and_more(model: Any, ids: Tensor) -> Tensor:
    logits, cache = [], {}
    for part in ids.split([12, 1, ids.shape[1] - 13], dim=1):
        output = model(part, use_cache=True, **cache)
        cache = {"cache": output.cache}
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


def scan_inputs(tokens: int, P: int = 4, N: int = 8) -> dict[str, Any]:
    """4 heads in 2 groups, with decays from almost none to almost total."""
    drawn = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(2, tokens, 4, P, generator=drawn),
        "dt": torch.randn(2, tokens, 4, generator=drawn),
        "A": -torch.tensor([0.01, 1.0, 16.0, 200.0]),
        "B": torch.randn(2, tokens, 2, N, generator=drawn),
        "C": torch.randn(2, tokens, 2, N, generator=drawn),
    }


@each("length", [1, 3, 8, 9, 40])
@each("begins", [False, True])
def test_chunks_compute_the_recurrence(length: int, begins: bool) -> None:
    """In float64 and token by token: h = exp(dt A) h + dt x B, y = h C + D x.

    A chunk has 4 tokens here, so these are 1 to 10 chunks, also with a part of one.
    """
    given = scan_inputs(length)
    D, bias = torch.tensor([0.5, -1.0, 0.0, 2.0]), torch.tensor([-3.0, -1.0, 0.0, 1.0])
    start = torch.randn(2, 4, 4, 8, generator=torch.Generator().manual_seed(1)) if begins else None
    got, last = chunk_scan(
        *given.values(),
        chunk_size=256,
        D=D,
        dt_bias=bias,
        dt_softplus=True,
        dt_limit=(0.01, 2.0),
        initial_states=start,
        return_final_states=True,
    )
    x, dt, A, B, C = (value.double() for value in given.values())
    dt = nn.functional.softplus(dt + bias).clamp(0.01, 2.0)
    B, C = (value.repeat_interleave(2, dim=2) for value in (B, C))
    state = torch.zeros(2, 4, 4, 8, dtype=torch.float64) if start is None else start.double()
    for t in range(length):
        put = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        state = (dt[:, t] * A).exp()[..., None, None] * state + put
        want = (state * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t]
        torch.testing.assert_close(got[:, t].double(), want, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(last.double(), state, atol=2e-5, rtol=1e-5)


@each("name", ["mamba", "mamba2"])
def test_double_precision_is_kept(name: str) -> None:
    """transformers computes these scans in float32 at most, so a row would differ by 1e-7 from itself in a batch."""
    model, ids = pico_family(name).double(), tokens(3, 20)
    with torch_scans(model), torch.no_grad():
        together, alone = model(ids).logits, model(ids[:1]).logits
    torch.testing.assert_close(together[:1], alone, atol=1e-12, rtol=0)


def test_memory_grows_in_proportion_to_the_tokens() -> None:
    """transformers combines every chunk with every earlier one."""
    peaks: dict[bool, list[int]] = {False: [], True: []}
    for ours in (False, True):
        for length in (512, 2048):
            given = [value.to("meta") for value in scan_inputs(length, N=16).values()]
            with Meter() as meter:
                (chunk_scan if ours else modeling_mamba2.mamba2_chunk_scan)(*given, chunk_size=8)
            peaks[ours].append(meter.peak)
    (stock_short, stock_long), (short, long) = peaks[False], peaks[True]
    assert long < 4.1 * short and short < stock_short
    assert stock_long > 5 * stock_short


LENGTHS = (5, 1, 9, 4)
DOCUMENTS = torch.arange(4, dtype=torch.int32).repeat_interleave(torch.tensor(LENGTHS)).expand(2, -1)


def of_each(values: Sequence[Tensor], function: Callable[..., Tensor], dim: int = 1) -> Tensor:
    """The function of each document alone, joined along its tokens."""
    parts = zip(*(value.split(LENGTHS, dim) for value in values), strict=True)
    return torch.cat([function(*part) for part in parts], dim)


def assert_same_gradients(packed: Tensor, alone: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(packed, alone, atol=1e-10, rtol=1e-10)
    weights = torch.randn(packed.shape, generator=torch.Generator().manual_seed(2), dtype=packed.dtype)
    for ours, theirs in zip(*(torch.autograd.grad((y * weights).sum(), inputs) for y in (packed, alone)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


def test_the_scan_of_a_packed_row_is_that_of_each_document() -> None:
    """Value and gradients, and the last state is the last document's; decays reach from none to total."""
    x, dt, A, B, C = (value.double().requires_grad_() for value in scan_inputs(sum(LENGTHS)).values())
    given: dict[str, Any] = {"chunk_size": 8, "dt_softplus": True, "D": torch.ones(4, dtype=torch.float64)}

    def scan(*parts: Tensor, **more: Any) -> Any:
        return chunk_scan(parts[0], parts[1], A, parts[2], parts[3], **given, **more)

    packed, last = scan(x, dt, B, C, seq_idx=DOCUMENTS, return_final_states=True)
    assert_same_gradients(packed, of_each([x, dt, B, C], scan), [x, dt, A, B, C])
    _, of_last = scan(*(v[:, -LENGTHS[-1] :] for v in (x, dt, B, C)), return_final_states=True)
    torch.testing.assert_close(last, of_last, atol=1e-10, rtol=1e-10)


@each("activation", [None, "silu"])
@each("bias", [False, True])
def test_the_convolution_of_a_packed_row_is_that_of_each_document(activation: str | None, bias: bool) -> None:
    drawn = torch.Generator().manual_seed(0)
    sizes = ((2, 6, sum(LENGTHS)), (6, 4), (6,))
    inputs = [torch.randn(size, generator=drawn, dtype=torch.float64).requires_grad_() for size in sizes]
    x, weight, shift = inputs[0], inputs[1], inputs[2] if bias else None

    def convolve(part: Tensor) -> Any:
        return modeling_mamba2.causal_conv1d_fn(part, weight, shift, activation)

    packed = packed_convolution(x, weight, shift, activation, seq_idx=DOCUMENTS)
    assert_same_gradients(packed, of_each([x], convolve, dim=2), inputs[: 2 + bias])


def test_a_family_whose_scan_does_not_separate_documents_refuses_them() -> None:
    x, index = torch.randn(2, 6, 8), torch.zeros(2, 8, dtype=torch.int32)
    with torch_scans(pico_family("mamba")), pytest.raises(ValueError, match=r"seq_idx: causal_conv1d_fn .*, not cpu"):
        modeling_mamba.causal_conv1d_fn(x, torch.randn(6, 4), seq_idx=index)


@each(
    ("name", "module", "function"),
    [("mamba", modeling_mamba, "mamba_selective_scan"), ("mamba2", modeling_mamba2, "mamba2_chunk_scan")],
)
def test_the_function_of_transformers_is_restored_after_an_error(name: str, module: Any, function: str) -> None:
    model, stock = pico_family(name), getattr(module, function)
    with pytest.raises(RuntimeError), torch_scans(model), torch_scans(model):
        assert getattr(module, function) is not stock
        raise RuntimeError
    assert getattr(module, function) is stock


@each("has_kernel", [False, True])
def test_a_kernel_runs_on_cuda_tensors_and_our_scan_on_others(
    has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(*_: Any, **__: Any) -> str:
        return "kernel"

    kernel.has_kernel = has_kernel  # type: ignore[attr-defined]
    monkeypatch.setattr(modeling_mamba2, "mamba2_chunk_scan", kernel)
    on_cpu = list(scan_inputs(8).values())
    on_cuda = [on_cpu[0].as_subclass(OnCuda), *on_cpu[1:]]
    with torch_scans(pico_family("mamba2")):
        found = [modeling_mamba2.mamba2_chunk_scan(*given, 8) for given in (on_cpu, on_cuda)]
    assert isinstance(found[0], Tensor) and (found[1] == "kernel" if has_kernel else isinstance(found[1], Tensor))


def test_what_runs_on_a_gpu_is_named_with_its_version_or_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("mamba_ssm")
    package.__version__ = "2.3"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mamba_ssm", package)
    missing = {"mamba2_chunk_scan": None, "causal_conv1d_fn": "causal_conv1d is not installed: pip install it"}
    monkeypatch.setattr(module_of_scans, "missing_kernel", missing.get)
    assert code_text(pico_family("mamba2"), torch.device("cuda")) == (
        "on cuda: scan by kernels of mamba_ssm 2.3; "
        "convolution by transformers' PyTorch code (causal_conv1d is not installed: pip install it)"
    )
