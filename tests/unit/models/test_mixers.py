"""Kinds of mixers: slices partition the weights, and streams at a decode step are those of the full pass.

`tests/integration/test_families.py` rebuilds every mixer's output from its streams, and
`tests/unit/splice/test_graft.py` compares the rows of every slice with the streams that they name.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from surgery.errors import ModelError
from surgery.models.hooks import ActivationCache, record
from surgery.models.layouts import Structure
from surgery.models.lookup import family_of, mixer_of, structure_of
from surgery.models.mixers.mamba2 import read_state, short_conv
from surgery.models.oracle_read import mixed_at_query, values_at
from surgery.types import MixerSpec
from tests.support.cases import each
from tests.support.llamba_loop import llamba
from tests.support.pico import HEAD_DIM, HEADS, pico_base, pico_family, tokens

GROUPS = (1, 2, 4)
MODELS = {
    **{f"mamba2-{n}": lambda n=n: pico_base(n_groups=n) for n in GROUPS},
    **{f"llamba-{n}": lambda n=n: llamba(n_qk_heads=n) for n in GROUPS},
    **{
        f"{name}-{width}": lambda name=name, width=width: pico_family(name, channels_per_head=width)
        for name in ("mamba", "falcon_mamba")
        for width in (1, 16, 64)
    },
}
every_model = each("make", MODELS)
every_attention = each("name", ["llama", "qwen2", "gpt_neox", "zamba2", "bamba", "granite", "nemotron_h", "falcon_h1"])


def of(model: Any, layer: int = 1) -> tuple[Structure, MixerSpec, Any]:
    """The structure of one layer's mixer, its spec and the mixer itself."""
    spec = family_of(model.config).mixers(model.config)[layer]
    return structure_of(spec), spec, mixer_of(model, spec)


@torch.no_grad()
def traced(model: Any, ids: Tensor, cache: Any = None) -> ActivationCache:
    with record(model, family_of(model.config).mixers(model.config)) as trace:
        model(ids, cache=cache, use_cache=cache is not None)
    return trace


@every_model
def test_slices_partition_the_weights(make: Any) -> None:
    structure, spec, mixer = of(make())
    heads = [structure.weight_slices(spec, head) for head in range(spec.num_heads)]
    firsts = heads[:: spec.num_heads // spec.num_groups]  # of each group, whose heads share key and query

    def rows(*parts: tuple[list[Any], str]) -> list[int]:
        slices = [getattr(head, name) for of_part, name in parts for head in of_part]
        return sorted(i for s in slices if s is not None for i in range(s.start, s.stop))

    projected = rows((heads, "gate"), (heads, "value"), (firsts, "key"), (firsts, "query"))
    steps = 0 if spec.kind in ("mamba1", "falcon_mamba") else spec.num_heads  # the last rows, which no slice names
    assert projected == list(range(mixer.in_proj.out_features - steps))
    channels = rows((heads, "conv_value"), (firsts, "conv_key"), (firsts, "conv_query"))
    assert channels == list(range(mixer.conv1d.out_channels))
    assert rows((heads, "out")) == list(range(mixer.out_proj.in_features))


@every_model
def test_streams_at_decode_equal_the_full_pass(make: Any) -> None:
    model, ids = make(), tokens(2, 21)
    whole = traced(model, ids)
    for prefix in (1, 2, 20):
        with torch.no_grad():
            cache = model(ids[:, :prefix], use_cache=True).cache
        before = {i: cache.layers[i].conv_states[0].clone() for i in range(3)}
        step = traced(model, ids[:, prefix : prefix + 1], cache)
        for layer in range(3):
            structure, spec, mixer = of(model, layer)
            full = structure.streams(mixer, spec, whole.projected[spec.name])
            one = structure.streams(mixer, spec, step.projected[spec.name], before[layer])
            for name, stream in vars(one).items():
                if stream is not None:
                    expected = getattr(full, name)[:, prefix : prefix + 1]
                    torch.testing.assert_close(stream, expected, atol=1e-5, rtol=1e-5)


@every_model
def test_hidden_attention_of_a_strong_decay_is_finite_and_causal(make: Any) -> None:
    """Its gradient too: masked before the exponential, or what is masked overflows."""
    model = make()
    structure, spec, mixer = of(model)
    projected = traced(model, tokens(1, 60)).projected["L1H"]
    if spec.kind == "llamba":
        projected[..., -HEADS:] += 50
    else:
        mixer.A_log.data += 12
    weights = structure.hidden_attention(mixer, spec, structure.streams(mixer, spec, projected.requires_grad_()))
    weights.sum().backward()
    assert weights.isfinite().all() and projected.grad.isfinite().all() and not weights.triu(1).any()


@each("n_groups", GROUPS)
def test_read_state_is_the_recurrence_without_its_state(n_groups: int) -> None:
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
def test_a_convolution_of_one_token_takes_its_window_from_fewer_rows(bias: bool) -> None:
    """Against the convolution of the window and the token together."""
    conv = torch.nn.Conv1d(6, 6, 4, groups=6, bias=bias)
    window, token = torch.randn(2, 6, 4), torch.randn(6, 1, 6)
    found = short_conv(conv, token, window)
    whole = torch.cat([window.repeat(3, 1, 1), token.transpose(1, 2)], -1)
    torch.testing.assert_close(found, conv(whole)[..., -1:].transpose(1, 2))


def projected_values(mixer: Any, spec: MixerSpec, u_BTD: Tensor) -> Tensor:
    """(B,T,H,P) from the weights: what every head's value is."""
    if spec.kind == "neox_attention":
        packed = mixer.query_key_value(u_BTD).unflatten(-1, (spec.num_heads, 3 * spec.head_dim))
        return packed[..., 2 * spec.head_dim :]
    values = mixer.v_proj(u_BTD).unflatten(-1, (spec.num_groups, spec.head_dim))
    return values[:, :, [spec.group_of(head) for head in range(spec.num_heads)]]


@every_attention
@torch.no_grad()
def test_attention_reads_its_values_from_the_cache_and_has_no_recurrence(name: str) -> None:
    model, ids, places = pico_family(name), tokens(2, 9), torch.tensor([3, 7])
    for spec in family_of(model.config).mixers(model.config):
        if spec.is_ssm:
            continue
        structure, mixer, seen = structure_of(spec), mixer_of(model, spec), []
        handle = mixer.register_forward_pre_hook(
            lambda _, args, kwargs, seen=seen: seen.append(args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        with record(model, [spec]) as trace:
            cache = model(input_ids=ids, use_cache=True).cache
        handle.remove()
        found = values_at(model, spec, trace, cache, places)
        if not getattr(model.config, "use_shared_attention_adapter", False):  # its value has an adapter on top
            expected = projected_values(mixer, spec, seen[0])[torch.arange(2), places]
            torch.testing.assert_close(found, expected)
        assert torch.equal(found[1, -1], cache.layers[spec.layer].values[1, -1, 7])
        mixed = mixed_at_query(model, spec, trace)
        torch.testing.assert_close(structure.out_proj(mixer)(mixed.flatten(1)), trace.output[spec.name][:, -1])
        assert not structure.skip(mixer, torch.ones(1, spec.num_heads, spec.head_dim)).any()
        for wrong in (structure.streams, structure.hidden_attention):
            with pytest.raises(ModelError, match=rf"layer: {spec.name}\. .*(no recurrence|output_attentions)"):
                wrong(mixer, spec, torch.zeros(1, 1, 1))
