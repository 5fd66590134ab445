"""Spliced attention switched off: what is left is the model without it, and it is back afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgery.errors import ModelError
from surgery.models.alterations import altered
from surgery.models.heads_off import heads_off
from surgery.models.lookup import family_of
from surgery.splice.graft import splice_model
from tests.support.pico import pico_base, pico_family, pico_hybrid, pico_site, tokens
from tests.support.teachers import plan_for, section, teacher_of


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(tokens(), use_cache=False).logits


def test_off_is_the_same_weights_without_a_branch() -> None:
    hybrid, base = pico_hybrid([pico_site(0, [1]), pico_site(2, [0, 3])]), pico_base()
    before = logits(hybrid)
    with heads_off(hybrid):
        torch.testing.assert_close(logits(hybrid), logits(base), rtol=0, atol=1e-6)
    assert torch.equal(logits(hybrid), before) and not torch.allclose(before, logits(base), atol=1e-3)


def test_a_head_that_was_replaced_stays_silent() -> None:
    hybrid = pico_hybrid([pico_site(1, [2], mode="replace")])
    with torch.no_grad():
        hybrid.backbone.layers[1].mixer.attention.o_proj.weight.normal_()
    with heads_off(hybrid):
        off = logits(hybrid)
    with torch.no_grad():
        hybrid.backbone.layers[1].mixer.attention.o_proj.weight.zero_()
    torch.testing.assert_close(off, logits(hybrid), rtol=0, atol=1e-6)
    assert not torch.allclose(off, logits(pico_base()), atol=1e-3)


@torch.no_grad()
def test_generation_runs_without_it_too() -> None:
    hybrid, base, ids = pico_hybrid([pico_site(1, [2])]), pico_base(), tokens()
    with heads_off(hybrid):
        found = hybrid.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    expected = base.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert torch.equal(found, expected)


@torch.no_grad()
def test_a_layer_that_was_swapped_gives_nothing() -> None:
    base, teacher = pico_family("llamba"), teacher_of("llama")
    chosen = section(mode="replace", unit="layer")
    hybrid = splice_model(base, plan_for(base, teacher, chosen, "L1H0"), chosen, teacher)
    before = logits(hybrid)
    with heads_off(hybrid):
        off = logits(hybrid)
    with altered(base, family_of(base.config).mixers(base.config), {"L1H": range(4)}):
        torch.testing.assert_close(off, logits(base), rtol=0, atol=1e-6)
    assert torch.equal(logits(hybrid), before) and not torch.allclose(off, before, atol=1e-3)


def test_a_model_without_a_splice_is_refused() -> None:
    with pytest.raises(ModelError, match="Nothing is spliced"), heads_off(pico_base()):
        pass
