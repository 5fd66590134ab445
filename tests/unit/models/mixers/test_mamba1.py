"""The layout of Mamba-1: channel groups hit the weights they name, and streams rebuild what the model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from surgery.models.hooks import ActivationCache, record
from surgery.models.layouts import Structure
from surgery.models.lookup import family_of, mixer_of, structure_of
from surgery.splice.graft import splice_model
from surgery.types import MixerSpec
from tests.support.battery import plan_of
from tests.support.cases import each
from tests.support.pico import pico_family, tokens

STREAMS = ("x", "key", "query", "step", "gate")
every_kind = each("name", ["mamba", "falcon_mamba"])
every_width = each("width", [1, 16, 64])


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scan and the norms cast to fp32 inside: in fp64 instead, so that an equality to 1e-9 can be asked for."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    monkeypatch.setattr(torch, "float32", torch.float64)


def of(model: Any, layer: int = 1) -> tuple[Structure, MixerSpec, Any]:
    """The structure of one layer's mixer, its spec and the mixer itself."""
    spec = family_of(model.config).mixers(model.config)[layer]
    return structure_of(spec), spec, mixer_of(model, spec)


@torch.no_grad()
def traced(model: Any, ids: Tensor, cache: Any = None) -> ActivationCache:
    """What every layer showed."""
    with record(model, family_of(model.config).mixers(model.config)) as trace:
        model(ids, cache_params=cache, use_cache=cache is not None)
    return trace


def rows(span: slice) -> list[int]:
    return list(range(span.start, span.stop))


class TestSlices:
    @every_width
    @every_kind
    def test_partition_of_in_proj_and_the_convolution(self, name: str, width: int) -> None:
        structure, spec, mixer = of(pico_family(name, channels_per_head=width))
        assert (spec.num_heads, spec.head_dim, spec.native_heads) == (64 // width, width, width == 1)
        heads = [structure.weight_slices(spec, h) for h in range(spec.num_heads)]
        found = [i for s in heads for part in (s.value, s.gate) for i in rows(part)]
        assert sorted(found) == list(range(mixer.in_proj.out_features))
        for part, size in (("conv_value", mixer.conv1d.out_channels), ("out", mixer.out_proj.in_features)):
            assert [i for s in heads for i in rows(getattr(s, part))] == list(range(size))
        assert all(getattr(s, part) is None for s in heads for part in ("key", "query", "conv_key", "conv_query"))

    @every_width
    @every_kind
    def test_each_slice_moves_the_stream_it_names(self, name: str, width: int) -> None:
        """And, of the value, what `x_proj` makes of all channels."""
        for part, stream in (("value", "x"), ("conv_value", "x"), ("gate", "gate")):
            model = pico_family(name, channels_per_head=width)
            structure, spec, mixer = of(model)
            head = spec.num_heads - 1
            one = structure.streams(mixer, spec, traced(model, tokens()).projected["L1H"])
            weights = mixer.conv1d.weight if part.startswith("conv") else mixer.in_proj.weight
            weights.data[getattr(structure.weight_slices(spec, head), part)] += 0.5
            other = structure.streams(mixer, spec, traced(model, tokens()).projected["L1H"])
            before, after = (getattr(s, stream).flatten(2).view(2, 21, spec.num_heads, width) for s in (one, other))
            moved = {h for h in range(spec.num_heads) if not torch.allclose(before[:, :, h], after[:, :, h])}
            assert moved == {head}
            shared = [not torch.allclose(getattr(one, s), getattr(other, s)) for s in ("key", "query", "step")]
            assert shared == [stream == "x"] * 3


class TestStreams:
    @staticmethod
    def assert_rebuilt(model: Any) -> None:
        """The input of every layer's `out_proj`, from its streams: one row of weights for each channel."""
        trace = traced(model, tokens(2, 13))
        for layer in range(3):
            structure, spec, mixer = of(model, layer)
            streams = structure.streams(mixer, spec, trace.projected[spec.name])
            weights = structure.hidden_attention(mixer, spec, streams)
            mixed = torch.einsum("bits,bsi->bti", weights, streams.x.flatten(2))
            rebuilt = (mixed + structure.skip(mixer, streams.x).flatten(2)) * streams.gate
            torch.testing.assert_close(rebuilt, trace.scan[spec.name], atol=1e-9, rtol=0)
            assert torch.equal(trace.scan[spec.name], trace.heads[spec.name]), "there is no norm between them"

    @every_kind
    @each("more", [{}, {"use_conv_bias": False}, {"use_bias": True}, {"hidden_act": "gelu"}])
    def test_rebuild_the_scan(self, name: str, more: dict, exact: None) -> None:
        self.assert_rebuilt(pico_family(name, **more).double())

    @every_kind
    @each("init", ["ssm", "random"])
    def test_of_a_hybrid(self, name: str, init: str, exact: None) -> None:
        base = pico_family(name)
        self.assert_rebuilt(splice_model(base, plan_of(base, "add", init)).double())

    @every_kind
    def test_hidden_attention_is_causal_and_has_its_formula(self, name: str) -> None:
        """Against the formula of docs/LOCATE.md, one entry at a time."""
        model = pico_family(name)
        structure, spec, mixer = of(model)
        streams = structure.streams(mixer, spec, traced(model, tokens(1, 12)).projected["L1H"])
        weights = structure.hidden_attention(mixer, spec, streams).detach()
        for i, t, s in [(0, 11, 0), (9, 11, 11), (40, 7, 3), (63, 5, 4)]:
            between = streams.step[0, s + 1 : t + 1, i].sum()
            decay = (-mixer.A_log[i].exp() * between).exp()
            expected = (streams.query[0, t, 0] * decay * streams.key[0, s, 0]).sum() * streams.step[0, s, i]
            torch.testing.assert_close(weights[0, i, t, s], expected.detach())
        assert weights.shape == (1, 64, 12, 12) and not weights.triu(1).any() and weights.isfinite().all()

    @every_kind
    def test_hidden_attention_of_a_strong_decay_is_finite(self, name: str) -> None:
        """Its gradient too: masked before the exponential, or what is masked overflows."""
        model = pico_family(name)
        structure, spec, mixer = of(model)
        mixer.A_log.data += 12
        streams = structure.streams(mixer, spec, traced(model, tokens(1, 40)).projected["L1H"])
        weights = structure.hidden_attention(mixer, spec, streams)
        weights.sum().backward()
        assert weights.isfinite().all() and mixer.A_log.grad.isfinite().all()

    @every_kind
    @each("prefix", [1, 2, 20])
    def test_at_decode_equal_the_full_pass(self, name: str, prefix: int) -> None:
        model, ids = pico_family(name), tokens(2, 21)
        whole = traced(model, ids)
        with torch.no_grad():
            cache = model(ids[:, :prefix], use_cache=True).cache_params
        before = {i: cache.layers[i].conv_states[0].clone() for i in range(3)}
        step = traced(model, ids[:, prefix : prefix + 1], cache=cache)
        for layer in range(3):
            structure, spec, mixer = of(model, layer)
            full = structure.streams(mixer, spec, whole.projected[spec.name])
            one = structure.streams(mixer, spec, step.projected[spec.name], before[layer])
            for stream in STREAMS:
                expected = getattr(full, stream)[:, prefix : prefix + 1]
                torch.testing.assert_close(getattr(one, stream), expected, atol=1e-5, rtol=1e-5)
