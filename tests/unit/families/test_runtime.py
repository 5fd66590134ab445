"""Chunks are shorter where there is no kernel, without a change of the function or of the config."""

from __future__ import annotations

import pytest
import torch

from surgery.families.runtime import CHUNK_WITHOUT_KERNELS, restore_chunks, shorten_chunks
from tests.pico import pico_family, tokens

FAMILIES = {"mamba2": "chunk_size", "zamba2": "chunk_size", "bamba": "mamba_chunk_size", "nemotron_h": "chunk_size"}


@torch.no_grad()
@pytest.mark.parametrize(("name", "field"), FAMILIES.items())
def test_the_function_and_the_config_stay(name: str, field: str) -> None:
    model, ids = pico_family(name, **{field: 64}), tokens(2, 50)
    published = model(ids).logits
    shorten_chunks(model)
    chunks = {m.chunk_size for _, m in model.named_modules() if "chunk_size" in vars(m)}
    assert chunks == {CHUNK_WITHOUT_KERNELS} and getattr(model.config, field) == 64
    torch.testing.assert_close(model(ids).logits, published, atol=1e-4, rtol=1e-4)
    restore_chunks(model)
    assert torch.equal(model(ids).logits, published)


def test_shorter_chunks_stay_and_other_models_too() -> None:
    model = pico_family("mamba2", chunk_size=8)
    shorten_chunks(model)
    assert model.backbone.layers[0].mixer.chunk_size == 8
    shorten_chunks(pico_family("llama"))
    shorten_chunks(pico_family("mamba"))
