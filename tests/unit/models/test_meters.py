"""The meters count the same on the meta device as on real tensors, and what they count is what is there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from surgery.models.meters import Meter, PassCost, measure
from tests.support.cases import each


def net(device: str) -> nn.Sequential:
    """Two layers whose parameters have gradients, as between two micro-batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.LayerNorm(16), nn.Linear(16, 4)).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def cost_of_net(device: str, rows: int = 5) -> PassCost:
    model, x = net(device), torch.ones(rows, 8, device=device)
    return measure(lambda: [model(x).log_softmax(-1)], model)


def test_meta_counts_what_real_tensors_count() -> None:
    assert cost_of_net("meta") == cost_of_net("cpu")


def test_flops_are_those_of_torch() -> None:
    model, x = net("cpu"), torch.ones(5, 8)
    with FlopCounterMode(display=False) as counter:
        model(x).log_softmax(-1).sum().backward()
    assert cost_of_net("meta").flops == counter.get_total_flops()


def test_the_peak_is_of_what_is_alive_at_once() -> None:
    with Meter() as meter:
        for _ in range(3):
            x = torch.zeros(100)
            del x
    assert meter.peak == 400 and meter.now == 0


def test_unknown_values_are_not_made_up() -> None:
    with Meter(), pytest.raises(NotImplementedError, match="values"):
        bool(torch.empty(3, device="meta").gt(0).all())


@each(
    "twice",
    [
        lambda x: (x.sum(0), x.sum(1)),
        lambda x: (x.sum(0), x.sum(0, keepdim=True)),
        lambda x: (x.repeat_interleave(2, 0), x.repeat_interleave(3, 0)),
        lambda x: (x.to(torch.bfloat16), x.to(torch.float64)),
        lambda x: (x + x.bfloat16(), x + x),
        lambda x: (torch.cat([x, x]), torch.cat([x, x], 1)),
        lambda x: (x.mul(2), x.t().mul(2)),
    ],
)
def test_layouts_are_reused_for_equal_calls_only(twice: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    def described(device: str) -> list[tuple[object, ...]]:
        with Meter():
            made = [*twice(torch.ones(4, 6, device=device)), *twice(torch.ones(4, 6, device=device))]
        return [(t.shape, t.stride(), t.dtype, t.device.type) for t in made]

    assert [d[:3] for d in described("meta")] == [d[:3] for d in described("cpu")]
    assert {d[3] for d in described("meta")} == {"meta"}


@each("grouped", [False, True])
@each("masked", [False, True])
def test_attention_keeps_no_scores(masked: bool, grouped: bool) -> None:
    """Query, key, value, output and a number a row: linear in the length, up to the mask, which heads share."""

    def saved(T: int) -> int:
        heads = 1 if grouped else 2
        q, k, v = (
            torch.ones(3, h, T, w, device="meta", requires_grad=True) for h, w in ((2, 8), (heads, 8), (heads, 4))
        )
        mask = torch.ones(3, 1, T, T, dtype=torch.bool, device="meta") if masked else None

        def run() -> list[Tensor]:
            return [F.scaled_dot_product_attention(q, k, v, mask, is_causal=not masked, enable_gqa=grouped)]

        return measure(run).saved - (3 * T * T * 4 if masked else 0)

    assert saved(128) - saved(64) == 2 * (saved(64) - saved(32)) > 0


def test_the_cost_of_several_passes() -> None:
    assert PassCost(7, 7, 4, 10).times(3) == PassCost(21, 21, 12, 30)
