"""Hooks: what is seen is what the model computed, what is changed is what was asked, and nothing stays behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from surgery.capture import PerfectRead, expand_cache, intervene, record
from surgery.errors import ModelError
from surgery.families import family_of
from tests.pico import HEAD_DIM, HEADS, HIDDEN, pad, pico_base, pico_hybrid, pico_site, random_site, tokens

FAMILY = family_of(pico_base().config)
MODELS = {
    "base": lambda: pico_base(n_groups=2),
    "hybrid": lambda: pico_hybrid([pico_site(0, [1, 3]), random_site(2, [0], "replace")]),
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())


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
        with record(model, FAMILY, [0, 2]) as trace:
            assert torch.equal(logits(model, ids), plain.logits)
        for layer in (0, 2):
            mixer = FAMILY.mixer(model, layer)
            assert torch.equal(trace.residual[layer], plain.hidden_states[layer])
            assert trace.scan[layer].shape == trace.heads[layer].shape == (2, 21, HEADS * HEAD_DIM)
            gate = trace.projected[layer][..., : HEADS * HEAD_DIM]
            normed = mixer.norm(trace.scan[layer], gate)
            torch.testing.assert_close(trace.heads[layer], normed)
        assert set(trace.residual) == set(trace.scan) == set(trace.projected) == set(trace.heads) == {0, 2}

    @every_model
    def test_leaves_no_hook(self, make: Any) -> None:
        model = make()
        before = hooks(model)
        with record(model, FAMILY, range(3)):
            assert len(hooks(model)) == len(before) + 12
            logits(model, tokens())
        assert hooks(model) == before

    def test_holds_no_graph(self) -> None:
        model = pico_base()
        with record(model, FAMILY, [1]) as trace:
            model(tokens())
        assert not any(t.requires_grad for t in (trace.heads[1], trace.scan[1], trace.projected[1], trace.residual[1]))


class TestHooks:
    def test_one_that_never_fired_is_an_error(self) -> None:
        model = pico_base()
        with pytest.raises(ModelError, match=r"hook: L\d .*kernel"), record(model, FAMILY, [0, 1]):
            model.backbone.layers[0](torch.randn(1, 3, HIDDEN))
        assert not hooks(model)
        with pytest.raises(ModelError, match="L1 out_proj"), intervene(model, FAMILY, {1: off(1, (0, 2))}, {}):
            pass
        assert not hooks(model)

    def test_a_kernel_that_reads_the_weight_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As the fused training kernel does."""
        model = pico_base()
        monkeypatch.setattr(FAMILY.mixer(model, 1), "forward", lambda u, **_: u @ torch.ones(HIDDEN, HIDDEN))
        with pytest.raises(ModelError, match="hook"), intervene(model, FAMILY, {1: off(1, (0, 2))}, {}):
            logits(model, tokens())

    @pytest.mark.parametrize("fires", [False, True])
    def test_an_exception_passes_and_leaves_no_hook(self, fires: bool) -> None:
        model = pico_base()
        read = PerfectRead(off(1, (0, 1)), torch.zeros(1, 2, HEADS, HEAD_DIM))
        for context in (
            lambda: record(model, FAMILY, range(3)),
            lambda: intervene(model, FAMILY, {0: off(1, (0, 2))}, {1: read}),
        ):
            with pytest.raises(KeyError, match="mine"), context():
                if fires:
                    logits(model, tokens())
                raise KeyError("mine")
            assert not hooks(model)

    def test_no_intervention_is_none(self) -> None:
        model = pico_base()
        with intervene(model, FAMILY, {}, {}):
            assert not hooks(model)


class TestIntervene:
    @every_model
    def test_ablation_is_removal_after_the_norm_at_the_last_token(self, make: Any) -> None:
        """Variants are folded into the batch: row w*B + b is prompt b under variant w."""
        model, ids = make(), tokens()
        changes: list[tuple[int, ...]] = [(), (2,), (0, 3)]
        mask = off(3, *((w, h) for w, heads in enumerate(changes) for h in heads))
        with intervene(model, FAMILY, {1: mask}, {}):
            folded = logits(model, ids.repeat(3, 1)).chunk(3)
        plain = logits(model, ids)
        torch.testing.assert_close(folded[0], plain)
        for w, heads in enumerate(changes):
            weight = FAMILY.out_proj(FAMILY.mixer(model, 1)).weight
            kept = copy.deepcopy(weight.data)
            for h in heads:
                weight.data[:, h * HEAD_DIM : (h + 1) * HEAD_DIM] = 0
            # At all tokens it would reach the query by the layer above too: the mixer's own output is compared.
            expected = self._mixer_output(model, ids)
            weight.data = kept
            with intervene(model, FAMILY, {1: mask[w : w + 1]}, {}):
                found = self._mixer_output(model, ids)
            torch.testing.assert_close(found[:, -1], expected[:, -1])
            torch.testing.assert_close(found[:, :-1], self._mixer_output(model, ids)[:, :-1])
            torch.testing.assert_close(folded[w][:, :-1], plain[:, :-1])
            assert ((folded[w] - plain).abs()[:, -1].max() > 1e-3) == bool(heads)

    @staticmethod
    def _mixer_output(model: Any, ids: Tensor) -> Tensor:
        seen: list[Tensor] = []
        handle = FAMILY.mixer(model, 1).register_forward_hook(lambda _, __, output: seen.append(output.detach()))
        logits(model, ids)
        handle.remove()
        return seen[0]

    @every_model
    def test_a_perfect_read_replaces_what_is_mixed_and_keeps_the_skip(self, make: Any) -> None:
        model, ids, layer = make(), tokens(), 1
        value = torch.randn(2, 2, HEADS, HEAD_DIM)
        read = PerfectRead(off(2, (0, 1), (1, 0), (1, 3)), value)
        with record(model, FAMILY, [layer]) as clean:
            logits(model, ids)
        seen: list[Tensor] = []
        mixer = FAMILY.mixer(model, layer)
        with intervene(model, FAMILY, {}, {layer: read}):
            handle = mixer.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
            logits(model, ids.repeat(2, 1))
            handle.remove()
        changed = seen[0].view(2, 2, 21, HEADS, HEAD_DIM)
        scan = clean.scan[layer].view(2, 21, HEADS, HEAD_DIM)
        x = FAMILY.streams(mixer, clean.projected[layer]).x[:, -1]
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
    @pytest.mark.parametrize("variants", [1, 3])
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
