"""The whole hybrid: decoding equals the full forward however it is fed, and splicing does what it says and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from surgery.hybrid import Mamba2HybridConfig, Mamba2HybridForCausalLM
from tests.support.pico import (
    HEAD_DIM,
    STATE,
    pad,
    pico_base,
    pico_hybrid,
    pico_site,
    prompts,
    random_site,
    randomise,
    tokens,
)

SPLICES = {
    "first": [pico_site(0, [1, 3])],
    "middle": [pico_site(1, [2])],
    "replace": [pico_site(1, [2], "replace")],
    "several": [pico_site(0, [1, 3]), random_site(2, [0], "replace")],
    "all": [pico_site(0, [0]), pico_site(1, [1, 2], "replace"), random_site(2, [3])],
}
every_splice = pytest.mark.parametrize("splice", SPLICES.values(), ids=SPLICES.keys())
every_implementation = pytest.mark.parametrize("implementation", ["eager", "sdpa"])
every_grouping = pytest.mark.parametrize("n_groups", [1, 2, 4])
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@torch.no_grad()
def full(model: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    return model(ids, attention_mask=mask, use_cache=False).logits


@torch.no_grad()
def generate(model: Any, ids: Tensor, mask: Tensor | None = None, new: int = 10, **more: Any) -> Tensor:
    """The new tokens only."""
    mask = torch.ones_like(ids) if mask is None else mask
    given = {"max_new_tokens": new, "do_sample": False, **more}
    return model.generate(ids, attention_mask=mask, **given)[:, ids.shape[1] :]


class TestDecoding:
    @every_splice
    @every_implementation
    @every_grouping
    def test_token_by_token(self, splice: list, implementation: str, n_groups: int) -> None:
        model, ids = pico_hybrid(splice, n_groups=n_groups, attn_implementation=implementation), tokens()
        cache, steps = None, []
        for t in range(ids.shape[1]):
            output = model(ids[:, t : t + 1], cache=cache, use_cache=True)
            cache = output.cache
            steps.append(output.logits)
        torch.testing.assert_close(torch.cat(steps, 1), full(model, ids), **CLOSE)

    @every_splice
    @every_implementation
    @pytest.mark.parametrize("border", [1, 2, 9])
    def test_several_tokens_after_a_prefix(self, splice: list, implementation: str, border: int) -> None:
        model, ids = pico_hybrid(splice, attn_implementation=implementation), tokens()
        first = model(ids[:, :border], use_cache=True)
        second = model(ids[:, border:], cache=first.cache, use_cache=True)
        torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), full(model, ids), **CLOSE)

    @every_splice
    @every_implementation
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padded_batch_equals_single_prompts(self, splice: list, implementation: str, side: Any) -> None:
        model = pico_hybrid(splice, attn_implementation=implementation)
        rows = [tokens(1, n, seed=n)[0] for n in (9, 14, 2)]
        ids, mask = pad(rows, side)
        logits = full(model, ids, mask)
        assert logits.isfinite().all()
        for b, row in enumerate(rows):
            torch.testing.assert_close(logits[b][mask[b].bool()], full(model, row[None])[0], **CLOSE)

    @every_splice
    @every_implementation
    def test_left_padded_prefix_then_decode(self, splice: list, implementation: str) -> None:
        """By hand, the mask growing with the tokens, one and then three at a time."""
        model = pico_hybrid(splice, attn_implementation=implementation)
        rows = [tokens(1, n, seed=n)[0] for n in (13, 18)]
        ids, mask = pad(rows, "left")
        output, steps = model(ids[:, :12], attention_mask=mask[:, :12], use_cache=True), []
        for start, end in ((12, 13), (13, 14), (14, 17), (17, 18)):
            cache = output.cache
            output = model(ids[:, start:end], attention_mask=mask[:, :end], cache=cache, use_cache=True)
            steps.append(output.logits)
        for b, row in enumerate(rows):
            torch.testing.assert_close(torch.cat(steps, 1)[b], full(model, row[None])[0, -6:], **CLOSE)

    @every_splice
    def test_eager_equals_sdpa(self, splice: list) -> None:
        batch = prompts((9, 14, 12))
        eager, sdpa = (
            full(pico_hybrid(splice, attn_implementation=i), batch.input_ids, batch.attention_mask)
            for i in ("eager", "sdpa")
        )
        real = batch.attention_mask.bool()
        torch.testing.assert_close(eager[real], sdpa[real], **CLOSE)

    @every_splice
    @every_implementation
    def test_causality(self, splice: list, implementation: str) -> None:
        model, ids = pico_hybrid(splice, attn_implementation=implementation), tokens()
        changed = ids.clone()
        changed[:, 11] = (ids[:, 11] + 1) % 50 + 3
        before, after = full(model, ids), full(model, changed)
        torch.testing.assert_close(before[:, :11], after[:, :11], atol=1e-6, rtol=0)
        assert ((before - after).abs().amax((0, 2))[11:] > 1e-4).all()

    def test_positions_come_from_the_tokens_alone(self) -> None:
        """No position code: the branch has a past to look at, and nothing counts from the left end of the batch."""
        model, ids = pico_hybrid(SPLICES["all"]), tokens(1, 9)
        padded, mask = pad([ids[0], tokens(1, 30)[0]], "left")
        torch.testing.assert_close(full(model, padded, mask)[0, -9:], full(model, ids)[0], **CLOSE)

    def test_embeddings_instead_of_tokens(self) -> None:
        model, ids = pico_hybrid(SPLICES["several"]), tokens()
        embedded = model.get_input_embeddings()(ids)
        assert torch.equal(model(inputs_embeds=embedded, use_cache=False).logits, full(model, ids))
        with pytest.raises(ValueError, match="exactly one"):
            model(ids, inputs_embeds=embedded)

    def test_logits_to_keep_and_hidden_states_and_tuples(self) -> None:
        model, ids = pico_hybrid(SPLICES["several"]), tokens()
        output = model(ids, use_cache=False, logits_to_keep=2, output_hidden_states=True)
        torch.testing.assert_close(output.logits, full(model, ids)[:, -2:])
        assert len(output.hidden_states) == 4 and output.cache is None
        assert torch.equal(model(ids, use_cache=False, return_dict=False)[0], full(model, ids))


class TestGenerate:
    @every_splice
    @every_implementation
    def test_cache_changes_nothing(self, splice: list, implementation: str) -> None:
        model, ids = pico_hybrid(splice, attn_implementation=implementation), tokens(length=9)
        greedy = generate(model, ids)
        assert torch.equal(greedy, generate(model, ids, use_cache=False))
        for t in range(10):  # and both are the argmax of a plain forward
            longer = torch.cat([ids, greedy[:, :t]], 1)
            assert torch.equal(full(model, longer)[:, -1].argmax(-1), greedy[:, t])

    @every_splice
    def test_beams(self, splice: list) -> None:
        model, ids = pico_hybrid(splice), tokens(length=9)
        beams = generate(model, ids, num_beams=3)
        assert torch.equal(beams, generate(model, ids, num_beams=3, use_cache=False))
        assert not torch.equal(beams, generate(model, ids)), "these beams never left the greedy path: nothing tested"

    @every_splice
    @pytest.mark.parametrize("beams", [1, 3])
    def test_left_padded(self, splice: list, beams: int) -> None:
        model, rows = pico_hybrid(splice), [tokens(1, n, seed=n)[0] for n in (5, 11)]
        together = generate(model, *pad(rows, "left"), num_beams=beams)
        for b, row in enumerate(rows):
            assert torch.equal(together[b], generate(model, row[None], num_beams=beams)[0])

    @every_splice
    def test_static_cache(self, splice: list) -> None:
        model, rows = pico_hybrid(splice), [tokens(1, n, seed=n)[0] for n in (5, 11)]
        ids, mask = pad(rows, "left")
        static = generate(model, ids, mask, new=5, cache_implementation="static")
        assert torch.equal(static, generate(model, ids, mask, new=5))

    @every_splice
    def test_sampling(self, splice: list) -> None:
        model, ids, drawn = pico_hybrid(splice), tokens(length=9), []
        for cached in (True, False):
            torch.manual_seed(0)
            drawn.append(generate(model, ids, do_sample=True, top_k=0, use_cache=cached))
        assert torch.equal(*drawn) and not torch.equal(drawn[0], generate(model, ids))


class TestIdentity:
    @every_grouping
    @pytest.mark.parametrize("splice", [[pico_site(1, [2])], [pico_site(0, [1, 3]), random_site(2, [0, 3])]])
    def test_fresh_branch_changes_no_bit(self, splice: list, n_groups: int) -> None:
        base, hybrid = pico_base(n_groups=n_groups), pico_hybrid(splice, fresh=True, n_groups=n_groups)
        batch = prompts((9, 14, 12))
        for mask in (None, batch.attention_mask):
            assert torch.equal(full(hybrid, batch.input_ids, mask), full(base, batch.input_ids, mask))
        assert torch.equal(generate(hybrid, batch.input_ids), generate(base, batch.input_ids))

    def test_trained_branch_changes_the_logits(self) -> None:
        for splice in SPLICES.values():
            moved = (full(pico_hybrid(splice), tokens()) - full(pico_base(), tokens())).abs().max()
            assert moved > 0.05

    def test_no_splice_is_the_base(self) -> None:
        assert torch.equal(full(pico_hybrid([]), tokens()), full(pico_base(), tokens()))

    def test_plain_checkpoint_loads_with_the_branch_alone_missing(self, tmp_path: Path) -> None:
        base = pico_base()
        base.save_pretrained(tmp_path)
        splice = [pico_site(0, [1, 3]), random_site(2, [0])]
        written = ("model_type", "architectures", "layer_types")
        fields = {k: v for k, v in base.config.to_dict().items() if k not in written}
        hybrid, info = Mamba2HybridForCausalLM.from_pretrained(
            tmp_path, config=Mamba2HybridConfig(**fields, splice=splice), output_loading_info=True
        )
        new = {name for name, _ in hybrid.named_parameters() if ".mixer.attention." in name}
        assert len(new) == (5 + 1) + 5 and set(info["missing_keys"]) == new
        assert not info["unexpected_keys"] and not info["mismatched_keys"]
        ours = hybrid.state_dict()
        for name, value in base.state_dict().items():
            assert torch.equal(ours[name], value), name
        assert torch.equal(full(hybrid.eval(), tokens()), full(base, tokens()))


class TestReplace:
    SITE = staticmethod(lambda *heads: [pico_site(1, heads, "replace")])

    @staticmethod
    def _perturbed(model: Any, head: int) -> Any:
        """The head's columns of `out_proj` and channels of the norm, replaced."""
        own, mixer = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM), model.backbone.layers[1].mixer
        mixer.out_proj.weight.data[:, own] = 7.0
        mixer.norm.weight.data[own] = -3.0
        return model

    @every_grouping
    @pytest.mark.parametrize("silenced", [(2,), (0, 3)])
    def test_silenced_heads_and_no_other(self, silenced: tuple[int, ...], n_groups: int) -> None:
        whole = full(pico_hybrid(self.SITE(*silenced), n_groups=n_groups), tokens())
        for head in range(4):
            model = self._perturbed(pico_hybrid(self.SITE(*silenced), n_groups=n_groups), head)
            for training in (False, True):
                assert torch.equal(full(model.train(training), tokens()), whole) == (head in silenced), head

    @every_grouping
    def test_equals_a_base_with_zeroed_columns(self, n_groups: int) -> None:
        """Silencing is after the gated norm: the other heads keep their scale."""
        hybrid, base = pico_hybrid(self.SITE(2), n_groups=n_groups), pico_base(n_groups=n_groups)
        hybrid.backbone.layers[1].mixer.attention.o_proj.weight.data.zero_()
        base.backbone.layers[1].mixer.out_proj.weight.data[:, 2 * HEAD_DIM : 3 * HEAD_DIM] = 0
        torch.testing.assert_close(full(hybrid, tokens()), full(base, tokens()), **CLOSE)

    def test_add_keeps_the_head(self) -> None:
        plain = full(pico_hybrid([pico_site(1, [2])]), tokens())
        assert not torch.equal(full(self._perturbed(pico_hybrid([pico_site(1, [2])]), 2), tokens()), plain)

    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_zero_columns_stay_zero_in_training(self, checkpointing: bool) -> None:
        model, ids = pico_hybrid(self.SITE(1, 2)).train(), tokens()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        weight, silent = model.backbone.layers[1].mixer.out_proj.weight, slice(HEAD_DIM, 3 * HEAD_DIM)
        weight.data[:, silent] = 0
        start = weight.detach().clone()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
        assert not weight[:, silent].any()
        assert (weight - start).abs()[:, :HEAD_DIM].min() > 0

    def test_mode_survives_a_failing_forward(self) -> None:
        """The mixer is in eval mode for the scan only, so that no fused kernel reads `out_proj` past the hook."""
        model = pico_hybrid(self.SITE(2)).train()
        mixer, seen = model.backbone.layers[1].mixer, []
        handle = mixer.in_proj.register_forward_hook(lambda *_: seen.append(mixer.training))
        model(tokens())
        handle.remove()
        assert seen == [False] and mixer.training

        def fail(*_: Any) -> None:
            raise RuntimeError("broken")

        mixer.in_proj.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="broken"):
            model(tokens())
        assert mixer.training


class TestCache:
    @every_splice
    def test_keys_and_values_of_spliced_layers_alone(self, splice: list) -> None:
        model, ids = pico_hybrid(splice), tokens(3, 17)
        cache = model(ids, use_cache=True).cache
        held = {
            layer: sum(x.numel() * x.element_size() for x in (slot.keys, slot.values))
            for layer, slot in enumerate(cache.layers)
            if isinstance(getattr(slot, "keys", None), Tensor)
        }
        expected = {s["layer"]: 3 * 17 * len(s["heads"]) * (s["qk_width"] + s["v_width"]) * 4 for s in splice}
        assert held == expected

    def test_growth_is_by_token(self) -> None:
        model, ids = pico_hybrid([pico_site(1, [0, 2])]), tokens(1, 5)
        cache = model(ids, use_cache=True).cache
        model(ids[:, :1], cache=cache, use_cache=True)
        assert cache.layers[1].keys.shape == (1, 2, 6, STATE) and cache.layers[1].values.shape == (1, 2, 6, HEAD_DIM)

    def test_layer_types_follow_the_splice(self) -> None:
        config = pico_hybrid([pico_site(0), pico_site(2)]).config
        assert config.layer_types == ["hybrid", "linear_attention", "hybrid"]
        config.splice = [pico_site(1)]
        assert config.layer_types == ["linear_attention", "hybrid", "linear_attention"]


class TestTraining:
    @staticmethod
    def _gradients(model: Any, reentrant: bool | None) -> dict[str, Tensor]:
        """Of the loss and of supervised attention rows together; also on a left-padded batch."""
        model.train().zero_grad()
        if reentrant is None:
            model.gradient_checkpointing_disable()
        else:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        batch = prompts((9, 14, 12))
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        output = model(batch.input_ids, attention_mask=batch.attention_mask, labels=labels, splice_queries=batch.query)
        gold = [r[torch.arange(3), :, 0, batch.segment_end[:, 0]].clamp(min=1e-9) for r in output.splice_attentions]
        (output.loss - sum(g.log().sum() for g in gold)).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    @every_splice
    @every_implementation
    def test_checkpointing_keeps_gradients(self, splice: list, implementation: str) -> None:
        model = pico_hybrid(splice, attn_implementation=implementation)
        plain, checkpointed = self._gradients(model, None), self._gradients(model, False)
        for name, gradient in plain.items():
            torch.testing.assert_close(checkpointed[name], gradient, **CLOSE)
        branch = {n: g for n, g in plain.items() if ".attention." in n}
        assert branch and all(g.abs().max() > 1e-6 for g in branch.values())

    def test_rows_reach_the_branch_and_below(self) -> None:
        model = pico_hybrid([pico_site(1)]).train()
        rows = model(tokens(), splice_queries=torch.tensor([[20], [20]])).splice_attentions[0]
        rows[..., 3].sum().backward()
        reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        branch = "backbone.layers.1.mixer.attention."
        below = "backbone.layers.0.mixer.in_proj.weight"
        assert {branch + "qkv_proj.weight", branch + "conv1d.weight", branch + "scale", below} <= reached
        assert not any(branch + name in reached for name in ("o_proj.weight", "gate_proj.weight"))
        assert not any("layers.2" in name or "lm_head" in name for name in reached)

    @pytest.mark.parametrize("keywords", [{"use_reentrant": True}, None])
    def test_reentrant_checkpointing_never_loses_the_rows_silently(self, keywords: dict | None) -> None:
        """Asked for by name it is refused; what the library takes by default is refused or works."""
        model, queries = pico_hybrid([pico_site(1)]).train(), torch.tensor([[20], [20]])
        model.gradient_checkpointing_enable(keywords)
        model.enable_input_require_grads()
        try:
            rows = model(tokens(), splice_queries=queries).splice_attentions[0]
        except ValueError as error:
            assert "use_reentrant" in str(error) and "splice_queries" in str(error)
        else:
            assert keywords is None
            rows[..., 3].sum().backward()
            assert model.backbone.layers[1].mixer.attention.scale.grad.any()
        assert model.eval()(tokens(), splice_queries=queries, use_cache=False).splice_attentions is not None

    def test_rows_with_a_cache_are_refused(self) -> None:
        model, queries = pico_hybrid([pico_site(1)]), torch.tensor([[20], [20]])
        for more in ({"use_cache": True}, {"cache": model(tokens()).cache}):
            with pytest.raises(ValueError, match=r"splice_queries.*use_cache=False"):
                model(tokens(), splice_queries=queries, **more)

    def test_rows_only_when_asked_for(self) -> None:
        assert pico_hybrid([pico_site(1)])(tokens(), use_cache=False).splice_attentions is None

    def test_rows_change_no_logit(self) -> None:
        model = pico_hybrid(SPLICES["several"])
        asked = model(tokens(), use_cache=False, splice_queries=torch.tensor([[20], [-1]]))
        assert torch.equal(asked.logits, full(model, tokens()))


class TestCheckpoint:
    @every_splice
    @pytest.mark.parametrize("auto", [False, True])
    def test_round_trip(self, splice: list, auto: bool, tmp_path: Path) -> None:
        model = pico_hybrid(splice, n_groups=2)
        model.save_pretrained(tmp_path)
        kind = AutoModelForCausalLM if auto else Mamba2HybridForCausalLM
        loaded, info = kind.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is Mamba2HybridForCausalLM
        assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert loaded.config.splice == splice and loaded.config.layer_types == model.config.layer_types
        assert torch.equal(full(loaded.eval(), tokens()), full(model, tokens()))

    def test_bfloat16_keeps_the_recurrence_in_fp32(self, tmp_path: Path) -> None:
        model, batch = pico_hybrid(SPLICES["all"]), prompts((9, 14, 12))
        model.save_pretrained(tmp_path)
        half = Mamba2HybridForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
        for name, p in half.named_parameters():
            kept = name.rsplit(".", 1)[-1] in ("A_log", "dt_bias", "D")
            assert p.dtype == (torch.float32 if kept else torch.bfloat16), name
            if kept:
                assert torch.equal(p, model.get_parameter(name))
        logits = full(half, batch.input_ids, batch.attention_mask)
        assert logits.dtype == torch.float32 and logits.isfinite().all()
        assert (logits - full(model, batch.input_ids, batch.attention_mask)).abs()[:, -1].max() < 0.5
        assert generate(half, batch.input_ids, batch.attention_mask, new=3).shape == (3, 3)

    def test_resized_embeddings(self) -> None:
        model = randomise(pico_hybrid([pico_site(1)]), 5)
        model.resize_token_embeddings(70)
        assert full(model, tokens()).shape[-1] == 70
