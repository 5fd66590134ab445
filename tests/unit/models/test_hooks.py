"""Hooks: each acts in its own layer, one that never fires is an error, and nothing stays behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from surgery.errors import ModelError
from surgery.models.hooks import record, replaced_once
from surgery.models.lookup import family_of
from surgery.models.oracle_read import OracleRead, intervene
from tests.support.cases import each
from tests.support.pico import HEAD_DIM, HEADS, HIDDEN, pico_base, tokens

SPECS = family_of(pico_base().config).mixers(pico_base().config)


def hooks(model: Any) -> list[Any]:
    """All hooks that are set."""
    return [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]


def off(variants: int, *heads: tuple[int, int]) -> Tensor:
    """(W,H) bool with these (variant, head) set."""
    mask = torch.zeros(variants, HEADS, dtype=torch.bool)
    for variant, head in heads:
        mask[variant, head] = True
    return mask


@torch.no_grad()
def logits(model: Any, ids: Tensor, **more: Any) -> Tensor:
    return model(ids, **{"use_cache": False, **more}).logits


def test_a_module_of_two_layers_is_seen_once_for_each() -> None:
    """As some models share a transformer block: a hook acts while its own layer runs, and at no other time."""
    model, ids = pico_base(), tokens()
    shared = model.backbone.layers[2].mixer.out_proj = model.backbone.layers[0].mixer.out_proj
    seen: list[Tensor] = []
    handle = shared.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    with record(model, SPECS) as trace:
        plain = logits(model, ids)
    handle.remove()
    assert len(seen) == 2 and not torch.equal(*seen)
    assert torch.equal(trace.heads["L0H"], seen[0]) and torch.equal(trace.heads["L2H"], seen[1])
    with record(model, SPECS[2:]) as alone:
        logits(model, ids)
    assert torch.equal(alone.heads["L2H"], seen[1])
    outputs = []
    for name in ("L0H", "L2H"):
        with intervene(model, SPECS, {name: off(1, (0, 1))}, {}), record(model, SPECS) as changed:
            outputs.append(logits(model, ids))
        assert torch.equal(changed.residual[2], trace.residual[2]) == (name == "L2H")
    assert all((output - plain)[:, -1].abs().max() > 1e-3 for output in outputs)


class TestHooks:
    def test_one_that_never_fired_is_an_error(self) -> None:
        model = pico_base()
        with pytest.raises(ModelError, match=r"hook: L\d.*kernel"), record(model, SPECS[:2]):
            model.backbone.layers[0](torch.randn(1, 3, HIDDEN))
        assert not hooks(model)
        ablate = {"L1H": off(1, (0, 2))}
        with pytest.raises(ModelError, match="L1H out_proj"), intervene(model, SPECS, ablate, {}):
            pass
        assert not hooks(model)

    def test_a_module_keeps_a_forward_of_its_own(self) -> None:
        """As Accelerate sets one on models that it moves between devices."""
        mixer, ran = pico_base().backbone.layers[0].mixer, []
        own, mixer.forward = mixer.forward, lambda *args, **kwargs: (ran.append(1), own(*args, **kwargs))[1]
        with replaced_once(mixer, lambda x: x, as_tuple=False):
            mixer(torch.ones(1, 3, HIDDEN))
        mixer(torch.ones(1, 3, HIDDEN))
        assert len(ran) == 1

    @each("fires", [False, True])
    def test_an_exception_passes_and_leaves_no_hook(self, fires: bool) -> None:
        model = pico_base()
        read = OracleRead(off(1, (0, 1)), torch.zeros(1, 2, HEADS, HEAD_DIM))
        for context in (
            lambda: record(model, SPECS),
            lambda: intervene(model, SPECS, {"L0H": off(1, (0, 2))}, {"L1H": read}),
        ):
            with pytest.raises(KeyError, match="mine"), context():
                if fires:
                    logits(model, tokens())
                raise KeyError("mine")
            assert not hooks(model)
