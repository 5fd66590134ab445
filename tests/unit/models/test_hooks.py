"""Hooks: what is seen is what the model computed, what is changed is what was asked, and nothing stays behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surgery.errors import ModelError
from surgery.models.cache import expand_cache
from surgery.models.hooks import ActivationCache, from_mixer, record
from surgery.models.lookup import family_of, mixer_of, structure_of
from surgery.models.oracle_read import OracleRead, intervene
from surgery.types import MixerSpec
from tests.support.cases import each
from tests.support.pico import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    SPLICED_FAMILIES,
    pad,
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

    @every_model
    def test_leaves_no_hook(self, make: Any) -> None:
        model = make()
        before = hooks(model)
        with record(model, SPECS):
            # A layer: the block's start and end, what it takes, and four places in its mixer.
            assert len(hooks(model)) == len(before) + 3 * 7
            logits(model, tokens())
        assert hooks(model) == before

    def test_holds_no_graph(self) -> None:
        model = pico_base()
        with record(model, SPECS) as trace:
            model(tokens())
        held = [t for store in vars(trace).values() if isinstance(store, dict) for t in store.values()]
        assert len(held) == 5 * 3 and not any(t.requires_grad for t in held)

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
        "hybrid-sdpa": lambda: pico_hybrid([pico_site(0, [1, 3]), random_site(2, [0])], attn_implementation="sdpa"),
        "hybrid-eager": lambda: pico_hybrid([pico_site(0, [1, 3]), random_site(2, [0])], attn_implementation="eager"),
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

    @every_kind
    def test_runs_nothing_below(self, make: Any) -> None:
        model, batch = make(), prompts((14, 14))
        _, trace, specs = self._clean(model, batch)
        for spec in specs:
            below = [mixer_of(model, s) for s in specs if s.layer < spec.layer]
            above = [mixer_of(model, s) for s in specs if s.layer >= spec.layer]
            with from_mixer(model, spec, trace, trace.output[spec.name]):
                ran = self._projections_that_run(model, specs, batch)
            assert ran == len(above) - 1 == len(specs) - len(below) - 1
        assert self._projections_that_run(model, specs, batch) == len(specs)

    @staticmethod
    def _projections_that_run(model: Any, specs: tuple[MixerSpec, ...], batch: Any) -> int:
        ran: list[nn.Module] = []
        projections = [structure_of(spec).out_proj(mixer_of(model, spec)) for spec in specs]
        handles = [p.register_forward_hook(lambda module, *_: ran.append(module)) for p in projections]
        logits(model, batch.input_ids)
        for handle in handles:
            handle.remove()
        return len(ran)

    def test_leaves_no_patch(self) -> None:
        """Not after an error either."""
        model, batch = pico_base(), prompts((14, 14))
        plain, trace, _ = self._clean(model, batch)
        for error in (False, True):
            try:
                with from_mixer(model, SPECS[1], trace, trace.output["L1H"]):
                    logits(model, batch.input_ids)
                    if error:
                        raise KeyError("mine")
            except KeyError:
                assert error
            assert not any("forward" in vars(module) for module in model.modules())
            assert torch.equal(logits(model, batch.input_ids), plain)

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

    def test_a_kernel_that_reads_the_weight_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As the fused training kernel does."""
        model = pico_base()
        monkeypatch.setattr(mixer_of(model, SPECS[1]), "forward", lambda u, **_: u @ torch.ones(HIDDEN, HIDDEN))
        ablate = {"L1H": off(1, (0, 2))}
        with pytest.raises(ModelError, match="hook"), intervene(model, SPECS, ablate, {}):
            logits(model, tokens())

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

    def test_no_intervention_is_none(self) -> None:
        """Nothing acts on a mixer; only the blocks' starts are noted."""
        model, plain = pico_base(), logits(pico_base(), tokens())
        with intervene(model, SPECS, {}, {}):
            assert len(hooks(model)) == 3 and not any(hooks(block.mixer) for block in model.backbone.layers)
            assert torch.equal(logits(model, tokens()), plain)
        assert not hooks(model)


class TestIntervene:
    @every_model
    def test_ablation_is_removal_after_the_norm_at_the_last_token(self, make: Any) -> None:
        """Variants are folded into the batch: row w*B + b is prompt b under variant w."""
        model, ids = make(), tokens()
        changes: list[tuple[int, ...]] = [(), (2,), (0, 3)]
        mask = off(3, *((w, h) for w, heads in enumerate(changes) for h in heads))
        with intervene(model, SPECS, {"L1H": mask}, {}):
            folded = logits(model, ids.repeat(3, 1)).chunk(3)
        plain = logits(model, ids)
        torch.testing.assert_close(folded[0], plain)
        for w, heads in enumerate(changes):
            weight = mixer_of(model, SPECS[1]).out_proj.weight
            kept = copy.deepcopy(weight.data)
            for h in heads:
                weight.data[:, h * HEAD_DIM : (h + 1) * HEAD_DIM] = 0
            # At all tokens it would reach the query by the layer above too: the mixer's own output is compared.
            expected = self._mixer_output(model, ids)
            weight.data = kept
            with intervene(model, SPECS, {"L1H": mask[w : w + 1]}, {}):
                found = self._mixer_output(model, ids)
            torch.testing.assert_close(found[:, -1], expected[:, -1])
            torch.testing.assert_close(found[:, :-1], self._mixer_output(model, ids)[:, :-1])
            torch.testing.assert_close(folded[w][:, :-1], plain[:, :-1])
            assert ((folded[w] - plain).abs()[:, -1].max() > 1e-3) == bool(heads)

    @staticmethod
    def _mixer_output(model: Any, ids: Tensor) -> Tensor:
        seen: list[Tensor] = []
        handle = mixer_of(model, SPECS[1]).register_forward_hook(lambda _, __, output: seen.append(output.detach()))
        logits(model, ids)
        handle.remove()
        return seen[0]

    @every_model
    def test_a_perfect_read_replaces_what_is_mixed_and_keeps_the_skip(self, make: Any) -> None:
        model, ids, spec = make(), tokens(), family_of(make().config).mixers(make().config)[1]
        value = torch.randn(2, 2, HEADS, HEAD_DIM)
        read = OracleRead(off(2, (0, 1), (1, 0), (1, 3)), value)
        with record(model, [spec]) as clean:
            logits(model, ids)
        seen: list[Tensor] = []
        mixer = mixer_of(model, spec)
        with intervene(model, [spec], {}, {spec.name: read}):
            handle = mixer.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
            logits(model, ids.repeat(2, 1))
            handle.remove()
        changed = seen[0].view(2, 2, 21, HEADS, HEAD_DIM)
        scan = clean.scan[spec.name].view(2, 21, HEADS, HEAD_DIM)
        x = structure_of(spec).streams(mixer, spec, clean.projected[spec.name]).x[:, -1]
        for w in range(2):
            torch.testing.assert_close(changed[w, :, :-1], scan[:, :-1])
            for h in range(HEADS):
                expected = value[w, :, h] + mixer.D[h] * x[:, h] if read.heads[w, h] else scan[:, -1, h]
                torch.testing.assert_close(changed[w, :, -1, h], expected)


class TestExpandCache:
    @staticmethod
    def _state(cache: Any) -> list[Tensor]:
        """Every tensor that the cache holds, in order."""
        found: list[Tensor] = []
        for layer in cache.layers:
            for held in (*layer.conv_states.values(), *layer.recurrent_states.values()):
                found += [held] if held is not None else []
            if isinstance(getattr(layer, "keys", None), Tensor):
                found += [layer.keys, layer.values]
        return found

    @every_model
    @each("variants", [1, 3])
    @torch.no_grad()
    def test_leaves_the_original_untouched(self, variants: int, make: Any) -> None:
        model, ids = make(), tokens()
        cache = model(ids[:, :-3], use_cache=True).cache_params
        before = [x.clone() for x in self._state(cache)]
        lengths = [slot.get_seq_length() for slot in cache.layers if hasattr(slot, "keys")]
        expanded = expand_cache(cache, variants)
        for t in range(3):
            model(ids[:, t : t + 1].repeat(variants, 1), cache_params=expanded, use_cache=True)
        assert all(torch.equal(a, b) for a, b in zip(self._state(cache), before, strict=True))
        assert [slot.get_seq_length() for slot in cache.layers if hasattr(slot, "keys")] == lengths
        found = model(ids[:, -3:], cache_params=cache, use_cache=True).logits
        torch.testing.assert_close(found, logits(model, ids)[:, -3:], atol=1e-5, rtol=1e-5)

    @every_model
    @torch.no_grad()
    def test_decodes_every_variant_as_the_full_pass(self, make: Any) -> None:
        """Variants go different ways from one prefix; prompts stay apart, left padding included."""
        model, W = make(), 3
        ids, mask = pad([tokens(1, n, seed=n)[0] for n in (12, 17)], "left")
        cache = model(ids, attention_mask=mask, use_cache=True).cache_params
        next_ids = tokens(W * 2, 2, seed=9)
        expanded = expand_cache(cache, W)
        folded_mask, steps = mask.repeat(W, 1), []
        for t in range(2):
            folded_mask = torch.cat([folded_mask, torch.ones(W * 2, 1, dtype=torch.long)], 1)
            step = model(next_ids[:, t : t + 1], cache_params=expanded, attention_mask=folded_mask, use_cache=True)
            steps.append(step.logits)
        for row in range(W * 2):
            prompt = ids[row % 2][mask[row % 2].bool()]
            whole = logits(model, torch.cat([prompt, next_ids[row]])[None])[0, -2:]
            torch.testing.assert_close(torch.cat(steps, 1)[row], whole, atol=1e-5, rtol=1e-5)
