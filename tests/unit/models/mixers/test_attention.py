"""Attention as a kind of mixer: its values lie in the cache, its columns in `o_proj`, and it has no recurrence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from surgery.errors import ModelError
from surgery.models.hooks import record
from surgery.models.lookup import family_of, mixer_of, structure_of
from surgery.models.oracle_read import mixed_at_query, values_at
from surgery.types import MixerSpec
from tests.support.cases import each
from tests.support.pico import pico_family, tokens

WITH_ATTENTION = ("llama", "qwen2", "gpt_neox", "zamba2", "bamba", "granite", "nemotron_h", "falcon_h1")
every_model = each("name", WITH_ATTENTION)


def attention_of(model: Any) -> list[MixerSpec]:
    return [spec for spec in family_of(model.config).mixers(model.config) if not spec.is_ssm]


def projected_values(mixer: Any, spec: MixerSpec, u_BTD: Tensor) -> Tensor:
    """(B,T,H,P) from the weights: what every head's value is."""
    if spec.kind == "neox_attention":
        packed = mixer.query_key_value(u_BTD).unflatten(-1, (spec.num_heads, 3 * spec.head_dim))
        return packed[..., 2 * spec.head_dim :]
    values = mixer.v_proj(u_BTD).unflatten(-1, (spec.num_groups, spec.head_dim))
    return values[:, :, [spec.group_of(head) for head in range(spec.num_heads)]]


@every_model
@torch.no_grad()
def test_values_are_those_of_the_cache_at_each_prompts_place(name: str) -> None:
    model, ids, places = pico_family(name), tokens(2, 9), torch.tensor([3, 7])
    for spec in attention_of(model):
        mixer, seen = mixer_of(model, spec), []
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
        kept = cache.layers[spec.layer].values
        assert found.shape == (2, spec.num_heads, spec.head_dim) and kept.shape[1] == spec.num_groups
        assert torch.equal(found[1, -1], kept[1, -1, 7])


@every_model
@torch.no_grad()
def test_what_is_mixed_at_the_query_is_the_input_of_the_output_projection(name: str) -> None:
    model = pico_family(name)
    for spec in attention_of(model):
        with record(model, [spec]) as trace:
            model(input_ids=tokens(), use_cache=False)
        mixed = mixed_at_query(model, spec, trace)
        assert torch.equal(mixed.flatten(1), trace.heads[spec.name][:, -1])
        output = structure_of(spec).out_proj(mixer_of(model, spec))(mixed.flatten(1))
        torch.testing.assert_close(output, trace.output[spec.name][:, -1])


@every_model
def test_has_no_recurrence(name: str) -> None:
    model = pico_family(name)
    for spec in attention_of(model):
        structure, mixer = structure_of(spec), mixer_of(model, spec)
        assert structure.in_proj(mixer) is None and structure.norm_weight(mixer) is None
        assert structure.state_numel(spec) == 0
        assert structure.kv_numel(spec) == 2 * spec.num_groups * spec.head_dim
        assert not structure.skip(mixer, torch.ones(1, spec.num_heads, spec.head_dim)).any()
        with pytest.raises(ModelError, match=rf"layer: {spec.name}\. .*no recurrence"):
            structure.streams(mixer, spec, torch.zeros(1, 1, 1))
        with pytest.raises(ModelError, match=rf"layer: {spec.name}\. .*output_attentions"):
            structure.hidden_attention(mixer, spec, None)
