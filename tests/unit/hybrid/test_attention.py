"""The branch by itself: equal to a naive one that loops over tokens, whatever its shape and implementation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from surgery.hybrid.modeling_hybrid import SplicedAttention, SplicePass, SpliceRows
from surgery.hybrid.modeling_mamba_hybrid import StreamAttention
from surgery.recipe import Splice
from surgery.splice.plan import splice_field
from tests.support.battery import plan_of
from tests.support.cases import each
from tests.support.pico import HIDDEN, pico_config, pico_family, pico_site, random_site, randomise

SITES = [
    pico_site(0, [2]),
    pico_site(0, [1, 3]),
    random_site(0, [0]),
    random_site(0, [0, 1, 3]),
    pico_site(0, [2], gate=False),
    pico_site(0, [0, 2], qk_width=3, v_width=5, activation=None),
    {**pico_site(0, [1, 3], qk_width=7), "copied_width": 3},
    {**pico_site(0, [1, 3]), "bias": True, "out_bias": True},
    {**random_site(0, [2]), "bias": True},
]


def naive(branch: SplicedAttention, u: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """(T,D) and (T,) bool -> the branch's output (T,D) and its weights (H,T,T), one token and one head at a time."""
    T, H, K, V = u.shape[0], branch.num_heads, branch.qk_width, branch.v_width
    bias = 0 if branch.conv1d.bias is None else branch.conv1d.bias
    before = torch.stack([branch.qkv_proj(u[t]) if real[t] else torch.zeros(H * (2 * K + V)) for t in range(T)])
    after = []
    for t in range(T):
        x = torch.zeros(H * (2 * K + V), dtype=u.dtype)
        for back in range(min(branch.conv_kernel, t + 1)):
            x = x + branch.conv1d.weight[:, 0, branch.conv_kernel - 1 - back] * before[t - back]
        x = x + bias
        activated = x * torch.sigmoid(x) if branch.silu else x
        new = [c < 2 * H * K and c % K >= branch.copied_width for c in range(len(x))]  # channels that are no copies
        after.append(torch.where(torch.tensor(new), x, activated))
    weights, outputs = torch.zeros(H, T, T, dtype=u.dtype), []
    for t in range(T):
        mixed = []
        for h in range(H):
            q = after[t][h * K : (h + 1) * K] * branch.scale[h]
            q[branch.copied_width :] /= math.sqrt(K - branch.copied_width or 1)
            seen = [s for s in range(t + 1) if real[s]]
            scores = [float(q @ after[s][H * K + h * K : H * K + (h + 1) * K]) for s in seen]
            total = sum(math.exp(score - max(scores)) for score in scores) if seen else 1.0
            y = torch.zeros(V, dtype=u.dtype)
            for s, score in zip(seen, scores, strict=True):
                weights[h, t, s] = math.exp(score - max(scores)) / total
                y = y + weights[h, t, s] * after[s][2 * H * K + h * V : 2 * H * K + (h + 1) * V]
            if branch.gate_proj is not None:
                z = branch.gate_proj(u[t])[h * V : (h + 1) * V]
                y = y * z * torch.sigmoid(z)
            mixed.append(y / torch.sqrt(y.pow(2).mean() + branch.config.layer_norm_epsilon))
        outputs.append(branch.o_proj(torch.cat(mixed)))
    return torch.stack(outputs), weights


def make(site: dict[str, Any], implementation: str = "sdpa", seed: int = 0) -> SplicedAttention:
    """A random branch in fp64."""
    branch = SplicedAttention(pico_config(attn_implementation=implementation), site, 0)
    return randomise(branch, seed).double().requires_grad_(False)


def inputs(batch: int = 2, length: int = 11) -> Tensor:
    return torch.randn(batch, length, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def masked(padding: Tensor | None, length: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """(B,1,T,T), 0 where a token is seen; a token of the padding sees itself, so that no row is empty."""
    seen = torch.ones(length, length).tril().bool()[None]
    if padding is not None:
        seen = (seen & padding[:, None, :].bool()) | torch.eye(length).bool()
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[:, None]


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch's fp32 norm and softmax in fp64, so that an equality to 1e-10 can be asked for."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    monkeypatch.setattr(torch, "float32", torch.float64)


@each("site", SITES)
@each("implementation", ["eager", "sdpa"])
def test_equals_the_naive_branch(site: dict, implementation: str, exact: None) -> None:
    branch, u = make(site, implementation), inputs()
    padding = torch.ones(2, 11)
    padding[1, :4] = 0
    output = branch(u, None, SplicePass(padding, masked(padding, 11)))[0]
    for b in range(2):
        real = padding[b].bool()
        expected, _ = naive(branch, u[b], real)
        torch.testing.assert_close(output[b][real], expected[real], atol=1e-10, rtol=0)


@each("site", SITES)
def test_rows_are_the_naive_weights(site: dict, exact: None) -> None:
    branch, u = make(site), inputs()
    padding = torch.ones(2, 11)
    padding[1, :4] = 0
    rows = SpliceRows(torch.tensor([[0, 6, 10], [-1, 4, 9]]))
    branch(u, None, SplicePass(padding, masked(padding, 11), rows))
    (found,) = rows.take()
    for b in range(2):
        _, weights = naive(branch, u[b], padding[b].bool())
        for q, t in enumerate(rows.queries_BQ[b].tolist()):
            expected = torch.zeros(branch.num_heads, 11, dtype=torch.float64) if t < 0 else weights[:, t]
            torch.testing.assert_close(found[b, :, q], expected, atol=1e-10, rtol=0)


def naive_stream(branch: StreamAttention, u: Tensor, x: Tensor, parameters: Tensor) -> Tensor:
    """(T,D), (T,I) and (T,rank+2N) -> (T,D), one token and one head at a time."""
    H, K, V, T = branch.num_heads, branch.qk_width, branch.v_width, len(u)
    queries, keys = branch.qk_proj.weight.view(2, H, K, -1)
    seen, start = [], 0
    for width in branch.stream_widths:
        part, start = parameters[:, start : start + width], start + width
        if branch.stream_eps is not None:
            part = part / torch.sqrt(part.pow(2).mean(-1, keepdim=True) + branch.stream_eps)
        seen.append(part)
    streams, outputs = torch.cat(seen, dim=1), []
    for t in range(T):
        mixed = []
        for h, group in enumerate(branch.heads):
            query = queries[h] @ streams[t] * branch.scale[h]
            query[branch.copied_width :] /= math.sqrt(K - branch.copied_width or 1)
            weights = torch.stack([query @ (keys[h] @ streams[s]) for s in range(t + 1)]).softmax(0)
            y = weights @ x[: t + 1, group * V : (group + 1) * V]
            z = branch.gate_proj.weight[h * V : (h + 1) * V] @ u[t]
            y = y * z * torch.sigmoid(z)
            mixed.append(y / torch.sqrt(y.pow(2).mean() + branch.norm_eps))
        outputs.append(branch.o_proj(torch.cat(mixed)))
    return torch.stack(outputs)


@each("name", ["mamba", "falcon_mamba"])
@each("width", [None, 6])
@each("implementation", ["eager", "sdpa"])
def test_a_branch_of_streams_equals_the_naive_one(
    name: str, width: int | None, implementation: str, exact: None
) -> None:
    """It reads what the mixer's `x_proj` took and gave; Falcon-Mamba's is normalised."""
    base = pico_family(name)
    site = splice_field(plan_of(base), base.config, Splice(min_width=width))[0]
    assert site["qk_width"] == (width or 4)
    base.config._attn_implementation = implementation
    branch = randomise(StreamAttention(base.config, site, 0), 0).double().requires_grad_(False)
    assert (branch.stream_eps is None) == (name == "mamba")
    u, rng = inputs(2, 7), torch.Generator().manual_seed(4)
    x, parameters = (torch.randn(2, 7, w, dtype=u.dtype, generator=rng) for w in (64, sum(branch.stream_widths)))
    output = branch(u, None, SplicePass(causal=masked(None, 7)), streams=(x, parameters))[0]
    for b in range(2):
        torch.testing.assert_close(output[b], naive_stream(branch, u[b], x[b], parameters[b]), atol=1e-10, rtol=0)


def test_rows_close_with_their_pass() -> None:
    """What gradient checkpointing recomputes later is not kept a second time."""
    rows, q = SpliceRows(torch.tensor([[1]])), torch.randn(1, 1, 3, 4)
    rows.collect(5, q, q, None)
    rows.collect(2, q * 2, q, None)
    from_below = rows.take()
    assert len(from_below) == 2 and not torch.equal(*from_below)
    fresh = SpliceRows(torch.tensor([[1]]))
    fresh.collect(2, q * 2, q, None)
    torch.testing.assert_close(from_below[0], fresh.take()[0])
    rows.collect(2, q, q, None)
    assert rows.take() == ()
