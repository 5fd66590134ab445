"""The planted checkpoint of bench/speed/real_shape.py computes the pico model's logits, at a small shape."""

from __future__ import annotations

from pathlib import Path

import torch

from bench.speed.real_shape import Shape, plant
from surgery.models.loading import load_model, load_tokenizer
from surgery.recipe import Base
from tests.integration.conftest import PICO_MAMBA2 as BASE


@torch.no_grad()
def test_a_planted_model_is_the_pico_model(tmp_path: Path) -> None:
    plant(tmp_path, Shape(d_model=256, n_layer=6, d_state=16, headdim=64, vocab_size=1030))
    pico, planted = load_model(Base(model=str(BASE))), load_model(Base(model=str(tmp_path)))
    ids = torch.randint(3, pico.config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    want = pico(ids).logits
    found = planted(ids).logits
    assert planted.config.vocab_size == 1040 and planted.config.num_hidden_layers == 6
    torch.testing.assert_close(found[..., : pico.config.vocab_size], want, atol=2e-4, rtol=1e-4)
    assert load_tokenizer(Base(model=str(tmp_path))).vocab_size == load_tokenizer(Base(model=str(BASE))).vocab_size
