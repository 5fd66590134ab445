"""Hooks: what is seen is what the model computed, what is changed is what was asked, and nothing stays behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from surgery.errors import ModelError
from surgery.models.hooks import ActivationCache, from_mixer, record
from surgery.models.lookup import family_of
from surgery.models.oracle_read import OracleRead, intervene
from surgery.types import MixerSpec
from tests.support.cases import each
from tests.support.pico import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    SPLICED_FAMILIES,
    pico_base,
    pico_family,
    pico_hybrid,
    pico_site,
    prompts,
    random_site,
    tokens,
)
from tests.support.rounding import assert_close_in_ulps

SPECS = family_of(pico_base().config).mixers(pico_base().config)
MODELS = {
    "base": lambda: pico_base(n_groups=2),
    "hybrid": lambda: pico_hybrid([pico_site(0, [1, 3]), random_site(2, [0], "replace")]),
}
every_model = each("make", MODELS.values(), ids=MODELS.keys())


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


class TestRecord:
    @every_model
    def test_sees_what_the_model_computed(self, make: Any) -> None:
        model, ids = make(), tokens()
        plain = model(ids, use_cache=False, output_hidden_states=True)
        with record(model, [SPECS[0], SPECS[2]]) as trace:
            assert torch.equal(logits(model, ids), plain.logits)
        residual = (model.get_input_embeddings()(ids), *plain.hidden_states)
        for layer, name in ((0, "L0H"), (2, "L2H")):
            mixer = model.backbone.layers[layer].mixer
            assert torch.equal(trace.residual[layer], residual[layer])
            torch.testing.assert_close(trace.output[name], residual[layer + 1] - residual[layer])
            assert trace.scan[name].shape == trace.heads[name].shape == (2, 21, HEADS * HEAD_DIM)
            gate = trace.projected[name][..., : HEADS * HEAD_DIM]
            normed = mixer.norm(trace.scan[name], gate)
            for site in getattr(model.config, "splice", ()):  # replaced heads are silenced before out_proj
                for head in site["heads"] if (site["layer"], site["mode"]) == (layer, "replace") else ():
                    normed[..., head * HEAD_DIM : (head + 1) * HEAD_DIM] = 0
            torch.testing.assert_close(trace.heads[name], normed)
        stored = (trace.scan, trace.projected, trace.heads, trace.output)
        assert all(set(store) == {"L0H", "L2H"} for store in stored) and set(trace.residual) == {0, 2}
        assert not trace.tuples

    def test_a_module_of_two_layers_is_seen_once_for_each(self) -> None:
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


class TestFromMixer:
    """A pass that begins after one mixer."""

    MODELS = {
        "base": lambda: pico_base(n_groups=2),
        "hybrid": lambda: pico_hybrid([pico_site(0, [1, 3]), random_site(2, [0])], attn_implementation="sdpa"),
        **{name: lambda name=name: pico_family(name) for name in (*SPLICED_FAMILIES[1:], "falcon_h1", "gpt_neox")},
    }
    every_kind = each("make", MODELS.values(), ids=MODELS.keys())

    @staticmethod
    def _clean(model: Any, batch: Any) -> tuple[Tensor, ActivationCache, tuple[MixerSpec, ...]]:
        specs = family_of(model.config).mixers(model.config)
        with record(model, specs) as trace:
            return logits(model, batch.input_ids, attention_mask=batch.attention_mask), trace, specs

    @every_kind
    @each("padded", [False, True])
    def test_from_each_mixer(self, make: Any, padded: bool) -> None:
        """With its own output it is the whole pass again, for every copy of the prompts."""
        model, batch = make(), prompts((9, 14, 12) if padded else (14, 14))
        plain, trace, specs = self._clean(model, batch)
        real, mask = batch.attention_mask.bool(), batch.attention_mask.repeat(2, 1)
        for spec in specs:
            with from_mixer(model, spec, trace, trace.output[spec.name].repeat(2, 1, 1)):
                again = logits(model, batch.input_ids.repeat(2, 1), attention_mask=mask)
            for found in again.chunk(2):
                assert_close_in_ulps(found[real], plain[real], 32)
            assert torch.equal(logits(model, batch.input_ids, attention_mask=batch.attention_mask), plain)

    @every_kind
    def test_sees_what_is_changed(self, make: Any) -> None:
        """The second copy's output is another one: its logits move, and the first copy's do not."""
        model, batch = make(), prompts((14, 14))
        plain, trace, specs = self._clean(model, batch)
        for spec in specs:
            output = trace.output[spec.name]
            with from_mixer(model, spec, trace, torch.cat([output, output + torch.randn(output.shape[-1])])):
                same, other = logits(model, batch.input_ids.repeat(2, 1)).chunk(2)
            assert_close_in_ulps(same, plain, 32)
            assert (other - plain)[:, -1].abs().max() > 1e-3, spec.name

    def test_one_that_never_ran_is_an_error(self) -> None:
        model, batch = pico_base(), prompts((14, 14))
        _, trace, _ = self._clean(model, batch)
        with (
            pytest.raises(ModelError, match="never called"),
            from_mixer(model, SPECS[1], trace, trace.output["L1H"]),
        ):
            pass
        assert not any("forward" in vars(module) for module in model.modules())


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
