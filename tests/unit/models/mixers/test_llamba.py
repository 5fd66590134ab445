"""The layout of Llamba: slices hit the weights they name, and the streams rebuild what the model computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surgery.models.hooks import ActivationCache, record
from surgery.models.layouts import Structure
from surgery.models.lookup import family_of, mixer_of, structure_of
from surgery.types import MixerSpec
from tests.support.cases import each
from tests.support.llamba_loop import llamba, llamba_site
from tests.support.pico import HEADS, tokens

every_grouping = each("n_qk_heads", [1, 2, 4])
SPLICE = [llamba_site(0, [1, 3]), llamba_site(2, [0], init="random")]
STREAMS = ("x", "key", "query", "step", "gate")


def of(model: Any, layer: int = 1) -> tuple[Structure, MixerSpec, Any]:
    """The structure of one layer's mixer, its spec and the mixer itself."""
    spec = family_of(model.config).mixers(model.config)[layer]
    return structure_of(spec), spec, mixer_of(model, spec)


@torch.no_grad()
def traced(model: Any, ids: Tensor, cache: Any = None) -> ActivationCache:
    """What every layer showed."""
    with record(model, family_of(model.config).mixers(model.config)) as trace:
        model(ids, past_key_values=cache, use_cache=cache is not None)
    return trace


def rows(span: slice) -> list[int]:
    return list(range(span.start, span.stop))


def step_rows(mixer: Any, head: int) -> slice:
    """The row of the decay, which no slice names: a branch has no use for it."""
    row = mixer.in_proj.out_features - HEADS + head
    return slice(row, row + 1)


class TestSlices:
    @every_grouping
    def test_partition_of_in_proj_and_the_convolution(self, n_qk_heads: int) -> None:
        structure, spec, mixer = of(llamba(n_qk_heads=n_qk_heads))
        heads = [structure.weight_slices(spec, h) for h in range(HEADS)]
        firsts = [heads[g * HEADS // n_qk_heads] for g in range(n_qk_heads)]
        found = [i for s in heads for name in ("gate", "value") for i in rows(getattr(s, name))]
        found += [i for h in range(HEADS) for i in rows(step_rows(mixer, h))]
        found += [i for s in firsts for name in ("key", "query") for i in rows(getattr(s, name))]
        assert sorted(found) == list(range(mixer.in_proj.out_features))
        channels = [i for s in heads for i in rows(s.conv_value)]
        channels += [i for s in firsts for name in ("conv_key", "conv_query") for i in rows(getattr(s, name))]
        assert sorted(channels) == list(range(mixer.conv1d.out_channels))
        assert sorted(i for s in heads for i in rows(s.out)) == list(range(mixer.out_proj.in_features))

    @every_grouping
    @each("name", ["value", "key", "query", "step", "gate", "conv_value", "conv_key", "conv_query"])
    def test_each_slice_moves_the_stream_it_names(self, name: str, n_qk_heads: int) -> None:
        model, head = llamba(n_qk_heads=n_qk_heads), 2
        structure, spec, mixer = of(model)
        projected = traced(model, tokens()).projected
        one = structure.streams(mixer, spec, projected["L1H"])
        weights = mixer.conv1d.weight if name.startswith("conv") else mixer.in_proj.weight
        own = step_rows(mixer, head) if name == "step" else getattr(structure.weight_slices(spec, head), name)
        weights.data[own] += 0.5
        other = structure.streams(mixer, spec, traced(model, tokens()).projected["L1H"])

        def moved(stream: str) -> set[int]:
            """Heads or groups whose stream is another one now."""
            before, after = getattr(one, stream), getattr(other, stream)
            if stream == "gate":
                before, after = before.unflatten(-1, (HEADS, -1)), after.unflatten(-1, (HEADS, -1))
            parts = zip(before.unbind(2), after.unbind(2), strict=True)
            return {i for i, (a, b) in enumerate(parts) if not torch.allclose(a, b)}

        stream = {"value": "x", "conv_value": "x"}.get(name, name.removeprefix("conv_"))
        expected = {stream: {spec.group_of(head) if stream in ("key", "query") else head}}
        for other_stream in STREAMS:
            assert moved(other_stream) == expected.get(other_stream, set()), other_stream


class TestStreams:
    @each(
        "config",
        [
            {"n_qk_heads": 1},
            {"n_qk_heads": 2},
            {"n_qk_heads": 4},
            {"ssm": {"bias": True}},
            {"ssm": {"activation": "silu", "conv_bias": False, "d_conv": 3, "expand": 2}},
            {"splice": SPLICE},
        ],
    )
    def test_rebuild_the_scan(self, config: dict) -> None:
        """In fp64, what `out_proj` takes: hidden attention times values, the skip, and the gate."""
        model = llamba(**config).double()
        trace = traced(model, tokens(2, 21))
        for layer in range(3):
            structure, spec, mixer = of(model, layer)
            streams = structure.streams(mixer, spec, trace.projected[spec.name])
            weights = structure.hidden_attention(mixer, spec, streams)
            mixed = torch.einsum("bhts,bshp->bthp", weights, streams.x) + structure.skip(mixer, streams.x)
            rebuilt = mixed.flatten(2) * streams.gate
            torch.testing.assert_close(rebuilt, trace.scan[spec.name], atol=1e-9, rtol=0)
            assert torch.equal(trace.scan[spec.name], trace.heads[spec.name]) and structure.norm_weight(mixer) is None

    def test_hidden_attention_is_causal_and_has_its_formula(self) -> None:
        """Against the formula of docs/LOCATE.md, one entry at a time, from the projection's own rows."""
        model = llamba()
        structure, spec, mixer = of(model)
        projected = traced(model, tokens(1, 12)).projected["L1H"]
        streams = structure.streams(mixer, spec, projected)
        weights = structure.hidden_attention(mixer, spec, streams).detach()
        for h, t, s in [(0, 11, 0), (1, 11, 11), (2, 7, 3), (3, 5, 4)]:
            g, decay = spec.group_of(h), projected[0, s + 1 : t + 1, h - HEADS].exp().log1p().sum()
            expected = streams.query[0, t, g] @ streams.key[0, s, g] * (-decay).exp()
            torch.testing.assert_close(weights[0, h, t, s], expected.detach())
        assert not weights.triu(1).any() and weights.isfinite().all()

    def test_hidden_attention_of_a_strong_decay_is_finite(self) -> None:
        """Its gradient too: masked before the exponential, or what is masked overflows."""
        model = llamba()
        structure, spec, mixer = of(model)
        projected = traced(model, tokens(1, 60)).projected["L1H"]
        projected[..., -HEADS:] += 50
        weights = structure.hidden_attention(mixer, spec, structure.streams(mixer, spec, projected.requires_grad_()))
        weights.sum().backward()
        assert weights.isfinite().all() and projected.grad.isfinite().all()

    @every_grouping
    @each("prefix", [1, 2, 20])
    def test_at_decode_equal_the_full_pass(self, prefix: int, n_qk_heads: int) -> None:
        model, ids = llamba(n_qk_heads=n_qk_heads), tokens(2, 21)
        whole = traced(model, ids)
        with torch.no_grad():
            cache = model(ids[:, :prefix], use_cache=True).past_key_values
        before = {i: cache.layers[i].conv_states[0].clone() for i in range(3)}
        step = traced(model, ids[:, prefix : prefix + 1], cache=cache)
        for layer in range(3):
            structure, spec, mixer = of(model, layer)
            full = structure.streams(mixer, spec, whole.projected[spec.name])
            one = structure.streams(mixer, spec, step.projected[spec.name], before[layer])
            for name in STREAMS:
                expected = getattr(full, name)[:, prefix : prefix + 1]
                torch.testing.assert_close(getattr(one, name), expected, atol=1e-5, rtol=1e-5)
