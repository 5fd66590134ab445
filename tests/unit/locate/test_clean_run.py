"""Sizes of what a clean run keeps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surgery.data.choice_scores import row_bytes
from surgery.locate.clean_run import run_clean
from tests.support.long_choices import long_prompts
from tests.support.pico import pico_family, prompts


def test_the_bytes_of_a_prompt_are_those_of_its_cache() -> None:
    model, batch = pico_family("bamba"), prompts((11, 11))  # states, and keys of its own
    run = run_clean(model, batch)
    with torch.no_grad():
        cache = model(batch.input_ids, use_cache=True).cache
    held = 0
    for layer in cache.layers:
        tensors = [getattr(layer, name, None) for name in ("keys", "values")]
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            tensors += states.values()
        held += sum(x.nbytes for x in tensors if isinstance(x, Tensor))
    assert held == len(batch) * run.cache_bytes and run.path_bytes == 0


def test_the_bytes_of_paths_are_those_of_the_prompt_and_of_its_share_of_paths() -> None:
    run = run_clean(pico_family("bamba"), long_prompts(3))
    assert run.paths is not None
    tokens, share = 14 + run.paths.ids.shape[1], math.ceil(len(run.paths) / 4)
    assert share > len(run.paths) / 4 and run.paths.ids.shape[1] > 1
    assert run.path_bytes == run.cache_bytes + share * row_bytes(run.model, tokens)
