"""Values that an oracle read takes: from the streams of an SSM, and from the cache of a sliding window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from surgery.errors import ModelError
from surgery.locate.clean_run import run_clean
from surgery.models.lookup import mixer_of, structure_of
from surgery.models.oracle_read import values_at
from surgery.types import MixerSpec
from tests.support.cases import each
from tests.support.pico import SPLICED_FAMILIES, pico_family, prompts

WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}  # in the layers 1 and 2 of three


@torch.no_grad()
def naive_values(model: Any, spec: MixerSpec, ids: Tensor) -> Tensor:
    """(B,T,H,P) values of all tokens, from the residual stream of a pass without a cache."""
    residual = model(ids, use_cache=False, output_hidden_states=True).hidden_states[spec.layer]
    block = model.model.layers[spec.layer]
    values_BTGP = block.self_attn.v_proj(block.input_layernorm(residual)).unflatten(-1, (spec.num_groups, -1))
    return values_BTGP.repeat_interleave(spec.num_heads // spec.num_groups, 2)


@torch.no_grad()
def test_in_a_cache_of_the_window_alone_earlier_tokens_are_refused() -> None:
    """A model's own cache of 13 tokens holds the last four, which the next token attends to."""
    model, batch = pico_family("qwen2", **WINDOW), prompts((14, 14))
    run = run_clean(model, batch)
    cache = model(batch.input_ids[:, :-1], use_cache=True).cache
    spec = run.specs[1]
    for place in range(13):
        arguments = (model, spec, run.prompt.activations, cache, torch.tensor([place, 12]))
        if place < 9:
            with pytest.raises(ModelError, match=r"layer: L1H. Its cache has dropped the first 9 tokens"):
                values_at(*arguments)
        else:
            expected = naive_values(model, spec, batch.input_ids)[torch.arange(2), arguments[-1]]
            torch.testing.assert_close(values_at(*arguments), expected, atol=1e-5, rtol=1e-5)


@each("name", SPLICED_FAMILIES)
@torch.no_grad()
def test_what_is_read_is_the_stream_of_the_whole_prompt_at_its_place(name: str) -> None:
    """Also where the short convolution begins before the first token."""
    model, batch = pico_family(name), prompts((14, 14, 14))
    run, places = run_clean(model, batch), torch.tensor([0, 2, 13])
    for spec in (spec for spec in run.specs if spec.is_ssm and structure_of(spec).in_proj(mixer_of(model, spec))):
        mixer, activations = mixer_of(model, spec), run.prompt.activations
        streams = structure_of(spec).streams(mixer, spec, activations.projected[spec.name])
        found = values_at(model, spec, activations, run.before_query, places)
        torch.testing.assert_close(found, streams.x[torch.arange(3), places], atol=1e-5, rtol=1e-5)
