"""mamba_ssm's own kernels against our scan: values, gradients, packed documents, first and last states.

Both compute in fp32 here. On a GPU the kernels multiply in tf32, which the interpreter does not show.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
from torch import Tensor
from transformers.models.mamba2 import modeling_mamba2

from surgery.models.torch_scans import chunk_scan, torch_scans
from tests.support.kernels import convolution
from tests.support.pico import pico_hybrid, random_site, randomise, tokens

T, CHUNK = 40, 16
INDEX = torch.arange(3, dtype=torch.int32).repeat_interleave(torch.tensor([17, 4, 19])).expand(2, -1)  # across chunks

KNOWN = signature(mamba_chunk_scan_combined).parameters


def inputs() -> dict[str, Tensor]:
    """4 heads of 16 channels in 2 groups, state width 16."""
    drawn = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=drawn)

    made = {"x": normal(2, T, 4, 16), "dt": normal(2, T, 4), "A": -normal(4).exp(), "B": normal(2, T, 2, 16)}
    made |= {"C": normal(2, T, 2, 16), "D": normal(4), "dt_bias": normal(4) - 2}
    return {name: value.requires_grad_() for name, value in made.items()}


def kernel(*args: Any, **kwargs: Any) -> Any:
    """mamba_ssm's function with the arguments that it knows, as transformers calls it."""
    return mamba_chunk_scan_combined(*args, **{key: value for key, value in kwargs.items() if key in KNOWN})


def largest(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, as a fraction of the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("begins", [False, True], ids=["from_zero", "from_a_state"])
@pytest.mark.parametrize("packs", [False, True], ids=["one_document", "packed"])
def test_the_scan(packs: bool, begins: bool, record_property: Callable[[str, object], None]) -> None:
    given = inputs()
    start = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(1)).requires_grad_() if begins else None
    more: dict[str, Any] = {"dt_softplus": True, "return_final_states": True, "seq_idx": INDEX if packs else None}
    wanted = [*given.values(), *([start] if start is not None else [])]
    found = []
    for scan in (chunk_scan, mamba_chunk_scan_combined):
        x, dt, A, B, C, D, dt_bias = given.values()
        y, state = scan(x, dt, A, B, C, CHUNK, D=D, dt_bias=dt_bias, initial_states=start, **more)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
        found.append([y, state, *torch.autograd.grad((y * weights).sum() + state.sum(), wanted)])
    for name, ours, theirs in zip(("y", "state", *given, "initial_states"), *found, strict=False):
        record_property(name, largest(ours, theirs))
        assert largest(ours, theirs) < 1e-5, name


@pytest.mark.parametrize("mode", ["add", "replace"])
@pytest.mark.parametrize("packs", [False, True], ids=["one_document", "packed"])
def test_a_hybrid(packs: bool, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients of a model with a spliced layer; the convolution is a reference in PyTorch."""
    model, ids = randomise(pico_hybrid([{**random_site(1), "mode": mode}]), 3).train(), tokens(2, T)
    given: dict[str, Any] = {"use_cache": False, **({"seq_idx": INDEX} if packs else {})}

    def step() -> list[Tensor]:
        model.zero_grad()
        loss = model(ids, **given).logits.float().log_softmax(-1)[..., 7].mean()
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    with torch_scans(model):
        ours = step()
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["seq_idx"] if packs else None)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(modeling_mamba2, "mamba2_chunk_scan", counted)
    monkeypatch.setattr(modeling_mamba2, "causal_conv1d_fn", convolution)
    monkeypatch.setattr(modeling_mamba2, "mamba2_split_conv1d_scan_combined", lambda *_, **__: None)
    theirs = step()
    assert len(calls) == model.config.num_hidden_layers and len(ours) == len(theirs) > 10
    scale = torch.stack([value.norm() for value in theirs[1:]]).norm()
    apart = torch.stack([(a - b).norm() for a, b in zip(ours[1:], theirs[1:], strict=True)]).norm()
    assert largest(ours[0], theirs[0]) < 1e-5 and float(apart / scale) < 1e-4


def test_a_prompt_and_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state after a prompt is the first state of the tokens after it."""
    model, ids = randomise(pico_hybrid([random_site(1)]), 3).eval(), tokens(2, T)

    def logits() -> Tensor:
        first = model(ids[:, :25], use_cache=True)
        return torch.cat([first.logits, model(ids[:, 25:], cache=first.cache).logits], dim=1)

    with torch.no_grad():
        with torch_scans(model):
            ours = logits()
        monkeypatch.setattr(modeling_mamba2, "mamba2_chunk_scan", kernel)
        theirs = logits()
    assert largest(ours, theirs) < 1e-4
