"""Kinds of mixers: slices partition the weights, and attention reads its values from the cache.

`tests/integration/test_families.py` rebuilds every mixer's output from its streams, and
`tests/unit/splice/test_graft.py` compares the rows of every slice with the streams that they name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surgery.models.hooks import record
from surgery.models.layouts import Structure
from surgery.models.lookup import family_of, mixer_of, structure_of
from surgery.models.oracle_read import mixed_at_query, values_at
from surgery.types import MixerSpec
from tests.support.cases import each
from tests.support.llamba_loop import llamba
from tests.support.pico import HEADS, pico_base, pico_family, tokens

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
def test_hidden_attention_of_a_strong_decay_is_finite_and_causal(make: Any) -> None:
    """Its gradient too: masked before the exponential, or what is masked overflows."""
    model = make()
    structure, spec, mixer = of(model)
    with record(model, [spec]) as trace, torch.no_grad():
        model(tokens(1, 60), use_cache=False)
    projected = trace.projected["L1H"]
    if spec.kind == "llamba":
        projected[..., -HEADS:] += 50
    else:
        mixer.A_log.data += 12
    weights = structure.hidden_attention(mixer, spec, structure.streams(mixer, spec, projected.requires_grad_()))
    weights.sum().backward()
    assert weights.isfinite().all() and projected.grad.isfinite().all() and not weights.triu(1).any()


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
