"""The layout of Mamba-2: slices hit the weights they name, and the streams rebuild what the model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from surgery.models.hooks import ActivationCache, record
from surgery.models.layouts import Structure
from surgery.models.lookup import family_of, mixer_of, structure_of
from surgery.models.mixers.mamba2 import read_state, short_conv
from surgery.types import MixerSpec
from tests.support.cases import each
from tests.support.pico import HEAD_DIM, HEADS, pico_base, pico_hybrid, pico_site, random_site, tokens

every_grouping = each("n_groups", [1, 2, 4])
SPLICE = [pico_site(0, [1, 3]), random_site(2, [0], "replace")]


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scan casts to fp32 inside: in fp64 instead, so that an equality to 1e-9 can be asked for."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)


def of(model: Any, layer: int = 1) -> tuple[Structure, MixerSpec, Any]:
    """The structure of one layer's mixer, its spec and the mixer itself."""
    spec = family_of(model.config).mixers(model.config)[layer]
    return structure_of(spec), spec, mixer_of(model, spec)


@torch.no_grad()
def traced(model: Any, ids: Tensor, mask: Tensor | None = None, cache: Any = None) -> ActivationCache:
    """What every layer showed."""
    with record(model, family_of(model.config).mixers(model.config)) as trace:
        model(ids, attention_mask=mask, cache_params=cache, use_cache=cache is not None)
    return trace


def rows(span: slice) -> list[int]:
    return list(range(span.start, span.stop))


def step_rows(spec: MixerSpec, head: int) -> slice:
    """The row of dt, which no slice names: a branch has no use for it."""
    last = 2 * spec.num_heads * spec.head_dim + 2 * spec.num_groups * spec.state_size
    return slice(last + head, last + head + 1)


class TestSlices:
    @every_grouping
    def test_partition_of_in_proj_and_the_convolution(self, n_groups: int) -> None:
        structure, spec, mixer = of(pico_base(n_groups=n_groups))
        heads = [structure.weight_slices(spec, h) for h in range(HEADS)]
        firsts = [heads[g * HEADS // n_groups] for g in range(n_groups)]
        found = [i for s in heads for name in ("gate", "value") for i in rows(getattr(s, name))]
        found += [i for h in range(HEADS) for i in rows(step_rows(spec, h))]
        found += [i for s in firsts for name in ("key", "query") for i in rows(getattr(s, name))]
        assert sorted(found) == list(range(mixer.in_proj.out_features))
        channels = [i for s in heads for i in rows(s.conv_value)]
        channels += [i for s in firsts for name in ("conv_key", "conv_query") for i in rows(getattr(s, name))]
        assert sorted(channels) == list(range(mixer.conv1d.out_channels))
        assert sorted(i for s in heads for i in rows(s.out)) == list(range(mixer.out_proj.in_features))

    @every_grouping
    @each("name", ["value", "key", "query", "step", "gate", "conv_value", "conv_key", "conv_query"])
    def test_each_slice_moves_the_stream_it_names(self, name: str, n_groups: int) -> None:
        model, head = pico_base(n_groups=n_groups), 2
        structure, spec, mixer = of(model)
        before = traced(model, tokens())
        one = structure.streams(mixer, spec, before.projected["L1H"])
        weights = mixer.conv1d.weight if name.startswith("conv") else mixer.in_proj.weight
        own = step_rows(spec, head) if name == "step" else getattr(structure.weight_slices(spec, head), name)
        weights.data[own] += 0.5
        after = traced(model, tokens())
        other = structure.streams(mixer, spec, after.projected["L1H"])

        def moved(stream: str) -> set[int]:
            """Heads or groups whose stream is another one now."""
            parts = zip(getattr(one, stream).unbind(2), getattr(other, stream).unbind(2), strict=True)
            return {i for i, (a, b) in enumerate(parts) if not torch.allclose(a, b)}

        stream = {"value": "x", "conv_value": "x"}.get(name, name.removeprefix("conv_"))
        expected = {stream: {spec.group_of(head) if stream in ("key", "query") else head}}
        for other_stream in ("x", "key", "query", "step"):
            assert moved(other_stream) == expected.get(other_stream, set()), other_stream
        if name == "gate":  # acts after the scan, and through the norm a little on every head
            assert torch.equal(before.scan["L1H"], after.scan["L1H"])
            change = (before.heads["L1H"] - after.heads["L1H"]).abs().mean((0, 1)).view(HEADS, HEAD_DIM).mean(1)
            assert int(change.argmax()) == head


class TestStreams:
    @staticmethod
    def _rebuilt(model: Any, layer: int, trace: ActivationCache) -> Tensor:
        structure, spec, mixer = of(model, layer)
        streams = structure.streams(mixer, spec, trace.projected[spec.name])
        weights = structure.hidden_attention(mixer, spec, streams)
        return torch.einsum("bhts,bshp->bthp", weights, streams.x) + mixer.D[:, None] * streams.x

    def assert_rebuilt(self, model: Any) -> None:
        """The scan of every layer, from its streams."""
        trace = traced(model, tokens(2, 21))
        for layer in range(3):
            rebuilt = self._rebuilt(model, layer, trace).flatten(2)
            torch.testing.assert_close(rebuilt, trace.scan[f"L{layer}H"], atol=1e-9, rtol=0)

    @every_grouping
    @each("limits", [(0.0, float("inf")), (0.3, 0.8)])
    def test_rebuild_the_scan(self, limits: tuple[float, float], n_groups: int, exact: None) -> None:
        self.assert_rebuilt(pico_base(n_groups=n_groups, time_step_limit=limits).double())

    @each("more", [{"use_conv_bias": False}, {"use_bias": True}, {"hidden_act": "gelu"}])
    def test_follow_the_config(self, more: dict, exact: None) -> None:
        self.assert_rebuilt(pico_base(n_groups=2, **more).double())

    def test_of_a_hybrid(self, exact: None) -> None:
        self.assert_rebuilt(pico_hybrid(SPLICE, n_groups=2).double())

    def test_hidden_attention_is_causal_and_has_its_formula(self) -> None:
        """Against the formula of docs/LOCATE.md, one entry at a time."""
        model = pico_base(n_groups=2)
        structure, spec, mixer = of(model)
        streams = structure.streams(mixer, spec, traced(model, tokens(1, 12)).projected["L1H"])
        weights = structure.hidden_attention(mixer, spec, streams).detach()
        for h, t, s in [(0, 11, 0), (1, 11, 11), (2, 7, 3), (3, 5, 4)]:
            g = spec.group_of(h)
            decay = -mixer.A_log[h].exp() * sum(streams.step[0, k, h] for k in range(s + 1, t + 1))
            expected = streams.query[0, t, g] @ streams.key[0, s, g] * decay.exp() * streams.step[0, s, h]
            torch.testing.assert_close(weights[0, h, t, s], expected.detach())
        assert not weights.triu(1).any() and weights.isfinite().all()

    def test_hidden_attention_of_a_strong_decay_is_finite(self) -> None:
        """Its gradient too: masked before the exponential, or what is masked overflows."""
        model = pico_base()
        structure, spec, mixer = of(model)
        mixer.A_log.data += 12
        trace = traced(model, tokens(1, 60))
        weights = structure.hidden_attention(mixer, spec, structure.streams(mixer, spec, trace.projected["L1H"]))
        weights.sum().backward()
        assert weights.isfinite().all() and mixer.A_log.grad.isfinite().all()

    @every_grouping
    @each("prefix", [1, 2, 20])
    def test_at_decode_equal_the_full_pass(self, prefix: int, n_groups: int) -> None:
        model, ids = pico_base(n_groups=n_groups), tokens(2, 21)
        whole = traced(model, ids)
        with torch.no_grad():
            cache = model(ids[:, :prefix], use_cache=True).cache_params
        before = {i: cache.layers[i].conv_states[0].clone() for i in range(3)}
        step = traced(model, ids[:, prefix : prefix + 1], cache=cache)
        for layer in range(3):
            structure, spec, mixer = of(model, layer)
            full = structure.streams(mixer, spec, whole.projected[spec.name])
            one = structure.streams(mixer, spec, step.projected[spec.name], before[layer])
            for name in ("x", "key", "query", "step"):
                expected = getattr(full, name)[:, prefix : prefix + 1]
                torch.testing.assert_close(getattr(one, name), expected, atol=1e-5, rtol=1e-5)


class TestOneToken:
    @every_grouping
    def test_read_state_is_the_recurrence_without_its_state(self, n_groups: int) -> None:
        """Against `C (a h + v B^T)` of each row and head by itself. Row w*B + b continues state b."""
        W, B = 3, 2
        state = torch.randn(B, HEADS, HEAD_DIM, 5)
        value, decay = torch.randn(W * B, HEADS, HEAD_DIM), torch.rand(W * B, HEADS)
        key, query = torch.randn(2, W * B, n_groups, 5).unbind()
        found = read_state(value, key, query, decay, state)
        for r in range(W * B):
            for h in range(HEADS):
                g = h * n_groups // HEADS
                after = decay[r, h] * state[r % B, h] + value[r, h, :, None] * key[r, g]
                torch.testing.assert_close(found[r, h], after @ query[r, g], atol=1e-5, rtol=1e-5)

    @each("bias", [False, True])
    def test_a_convolution_of_one_token_takes_its_window_from_fewer_rows(self, bias: bool) -> None:
        """Against the convolution of the window and the token together."""
        conv = torch.nn.Conv1d(6, 6, 4, groups=6, bias=bias)
        window, token = torch.randn(2, 6, 4), torch.randn(6, 1, 6)
        found = short_conv(conv, token, window)
        whole = torch.cat([window.repeat(3, 1, 1), token.transpose(1, 2)], -1)
        torch.testing.assert_close(found, conv(whole)[..., -1:].transpose(1, 2))
