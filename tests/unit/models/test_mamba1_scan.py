"""The training scan of Mamba-1 computes what transformers' does, and its backward pass is linear."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.mamba import modeling_mamba

from surgery.models.mamba1_scan import linear_backward
from surgery.testing.pico import pico_family, tokens

FAMILIES = ("mamba", "falcon_mamba")


def loss_and_gradients(model: nn.Module, ids: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers(name: str) -> None:
    model, ids = pico_family(name).train(), tokens(2, 20)
    stock = loss_and_gradients(model, ids)
    with linear_backward(model):
        ours = loss_and_gradients(model, ids)
    assert len(stock) == len(ours) > 10
    for want, got in zip(stock, ours, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_state_after_a_prompt_is_that_of_transformers(name: str) -> None:
    model, ids = pico_family(name), tokens(2, 12)
    with torch.no_grad():
        want = model(ids, use_cache=True)
        with linear_backward(model):
            got = model(ids, use_cache=True)
        later = [model(ids[:, :1], cache_params=out.cache_params).logits for out in (want, got)]
    torch.testing.assert_close(later[1], later[0], atol=1e-5, rtol=1e-4)


def test_the_backward_pass_is_linear_in_the_number_of_tokens() -> None:
    """A gradient of an index is as large as all tokens; that of `unbind` is stacked once."""
    model = pico_family("mamba").train()
    counts = []
    for length in (8, 16):
        graph: list[str] = []
        with linear_backward(model):
            loss = model(tokens(1, length), use_cache=False).logits.sum()
        seen: set[Any] = set()
        waiting: list[Any] = [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            graph.append(type(node).__name__)
            waiting.extend(parent for parent, _ in node.next_functions)
        counts.append(graph.count("SelectBackward0"))
    assert counts[0] == counts[1]


def test_the_function_of_transformers_is_restored_after_an_error() -> None:
    model, stock = pico_family("mamba"), modeling_mamba.mamba_selective_scan
    with pytest.raises(RuntimeError), linear_backward(model):
        assert modeling_mamba.mamba_selective_scan is not stock
        raise RuntimeError
    assert modeling_mamba.mamba_selective_scan is stock


def test_other_families_keep_theirs() -> None:
    stock = modeling_mamba.mamba_selective_scan
    with linear_backward(pico_family("mamba2")):
        assert modeling_mamba.mamba_selective_scan is stock
