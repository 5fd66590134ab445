"""The paper's procedures: what is gone is gone, at the right tokens, and only while it lasts."""

from __future__ import annotations

import pytest
import torch

from surgery.errors import ModelError
from surgery.models.alterations import altered, heads_off
from surgery.models.lookup import block_of, family_of
from surgery.splice.graft import splice_model
from tests.support.cases import each
from tests.support.pico import FAMILY_NAMES, pico_base, pico_family, pico_hybrid, pico_site, tokens
from tests.support.teachers import plan_for, section, teacher_of

every_family = each("name", FAMILY_NAMES)


def logits(model, **change):
    specs = family_of(model.config).mixers(model.config)
    with torch.no_grad(), altered(model, specs, **{"off": {}, **change}):
        return model(tokens(2, 13), use_cache=False).logits


@torch.no_grad()
@every_family
def test_fewer_layers_are_a_smaller_model(name: str) -> None:
    model, seen = pico_family(name), {}
    before = model(tokens(2, 13), use_cache=False).logits
    blocks = model.base_model.layers
    handle = blocks[-1].register_forward_pre_hook(lambda _, args: seen.update(below=args[0]))
    model(tokens(2, 13), use_cache=False)
    handle.remove()
    norm = next(m for n, m in model.base_model.named_children() if "norm" in n)
    final = []
    handle = norm.register_forward_pre_hook(lambda _, args: final.append(args[0]))
    logits(model, layers=len(blocks) - 1)
    handle.remove()
    assert torch.equal(final[0], seen["below"])
    assert model.base_model.layers is blocks
    assert torch.equal(model(tokens(2, 13), use_cache=False).logits, before)


@torch.no_grad()
@every_family
def test_layers_above_a_dropped_one_take_what_it_took(name: str) -> None:
    """At any place, also in a cut model: what enters the next block is what entered the dropped one."""
    model, seen = pico_family(name), {}
    spec = family_of(model.config).mixers(model.config)[0]
    for layer in (0, 1, 2):
        block_of(model, layer, spec).register_forward_pre_hook(
            lambda _, args, layer=layer: seen.update({layer: args[0].clone()})
        )
    logits(model, drop=(0, 1))
    assert torch.equal(seen[1], seen[0]) and torch.equal(seen[2], seen[0])
    cut = logits(model, drop=(0,), layers=2)
    assert torch.equal(seen[1], seen[0])
    assert not torch.equal(cut, logits(model, layers=2))


@each("name", ["zamba2", "bamba", "falcon_h1", "llama", "gpt_neox"])
def test_a_masked_row_is_the_last_one_alone(name: str) -> None:
    model = pico_family(name)
    with torch.no_grad():
        clean = model(tokens(2, 13), use_cache=False).logits
    found = logits(model, mask_last_row=True)
    torch.testing.assert_close(found[:, :-1], clean[:, :-1])
    assert (found[:, -1] - clean[:, -1]).abs().max() > 1e-3


@torch.no_grad()
def test_a_spliced_branch_has_a_last_row_too() -> None:
    """Masked, the last token is the base's: the branch is all that they differ by, in the top layer alone."""
    base, hybrid = pico_family("mamba2", n_groups=1), pico_hybrid([pico_site(2, [2])])
    with_branch, without = hybrid(tokens(2, 13), use_cache=False).logits, base(tokens(2, 13), use_cache=False).logits
    found = logits(hybrid, mask_last_row=True)
    torch.testing.assert_close(found[:, :-1], with_branch[:, :-1])
    torch.testing.assert_close(found[:, -1], without[:, -1])
    assert (with_branch[:, -1] - without[:, -1]).abs().max() > 1e-3


@torch.no_grad()
def plain(model):
    return model(tokens(), use_cache=False).logits


def test_off_is_the_same_weights_without_a_branch() -> None:
    hybrid, base = pico_hybrid([pico_site(0, [1]), pico_site(2, [0, 3])]), pico_base()
    before = plain(hybrid)
    with heads_off(hybrid):
        torch.testing.assert_close(plain(hybrid), plain(base), rtol=0, atol=1e-6)
    assert torch.equal(plain(hybrid), before) and not torch.allclose(before, plain(base), atol=1e-3)


def test_a_head_that_was_replaced_stays_silent() -> None:
    hybrid = pico_hybrid([pico_site(1, [2], mode="replace")])
    with torch.no_grad():
        hybrid.backbone.layers[1].mixer.attention.o_proj.weight.normal_()
    with heads_off(hybrid):
        off = plain(hybrid)
    with torch.no_grad():
        hybrid.backbone.layers[1].mixer.attention.o_proj.weight.zero_()
    torch.testing.assert_close(off, plain(hybrid), rtol=0, atol=1e-6)
    assert not torch.allclose(off, plain(pico_base()), atol=1e-3)


@torch.no_grad()
def test_a_layer_that_was_swapped_gives_nothing() -> None:
    base, teacher = pico_family("llamba"), teacher_of("llama")
    chosen = section(mode="replace", unit="layer")
    hybrid = splice_model(base, plan_for(base, teacher, chosen, "L1H0"), chosen, teacher)
    before = plain(hybrid)
    with heads_off(hybrid):
        off = plain(hybrid)
    with altered(base, family_of(base.config).mixers(base.config), {"L1H": range(4)}):
        torch.testing.assert_close(off, plain(base), rtol=0, atol=1e-6)
    assert torch.equal(plain(hybrid), before) and not torch.allclose(off, before, atol=1e-3)


def test_a_model_without_a_splice_is_refused() -> None:
    with pytest.raises(ModelError, match="Nothing is spliced"), heads_off(pico_base()):
        pass
