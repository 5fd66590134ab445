"""Llamba with spliced heads: the same promises as for the other hybrids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from surgery.hybrid import LlambaForCausalLM
from tests.support.llamba_loop import HEAD_DIM, full, generate, llamba, llamba_site
from tests.support.pico import STATE, pad, prompts, tokens

SPLICES = {
    "first": [llamba_site(0, [1, 3])],
    "replace": [llamba_site(1, [2], "replace")],
    "all": [llamba_site(0, [0]), llamba_site(1, [1, 2], "replace"), llamba_site(2, [3], init="random")],
}
every_splice = pytest.mark.parametrize("splice", SPLICES.values(), ids=SPLICES.keys())
every_implementation = pytest.mark.parametrize("implementation", ["eager", "sdpa"])
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


class TestDecoding:
    @every_splice
    @every_implementation
    def test_token_by_token(self, splice: list, implementation: str) -> None:
        model, ids = llamba(splice=splice, attn_implementation=implementation), tokens()
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
        model, ids = llamba(splice=splice, attn_implementation=implementation), tokens()
        first = model(ids[:, :border], use_cache=True)
        second = model(ids[:, border:], cache=first.cache, use_cache=True)
        torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), full(model, ids), **CLOSE)

    @every_splice
    @every_implementation
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padded_batch_equals_single_prompts(self, splice: list, implementation: str, side: Any) -> None:
        model = llamba(splice=splice, attn_implementation=implementation)
        rows = [tokens(1, n, seed=n)[0] for n in (9, 14, 2)]
        ids, mask = pad(rows, side)
        logits = full(model, ids, mask)
        assert logits.isfinite().all()
        for b, row in enumerate(rows):
            torch.testing.assert_close(logits[b][mask[b].bool()], full(model, row[None])[0], **CLOSE)

    @every_splice
    def test_left_padded_prefix_then_decode(self, splice: list) -> None:
        model, rows = llamba(splice=splice), [tokens(1, n, seed=n)[0] for n in (13, 18)]
        ids, mask = pad(rows, "left")
        output, steps = model(ids[:, :12], attention_mask=mask[:, :12], use_cache=True), []
        for start, end in ((12, 13), (13, 14), (14, 17), (17, 18)):
            cache = output.cache
            output = model(ids[:, start:end], attention_mask=mask[:, :end], cache=cache, use_cache=True)
            steps.append(output.logits)
        for b, row in enumerate(rows):
            torch.testing.assert_close(torch.cat(steps, 1)[b], full(model, row[None])[0, -6:], **CLOSE)

    @every_splice
    @every_implementation
    def test_causality(self, splice: list, implementation: str) -> None:
        model, ids = llamba(splice=splice, attn_implementation=implementation), tokens()
        changed = ids.clone()
        changed[:, 11] = (ids[:, 11] + 1) % 50 + 3
        before, after = full(model, ids), full(model, changed)
        torch.testing.assert_close(before[:, :11], after[:, :11], atol=1e-6, rtol=0)
        assert ((before - after).abs().amax((0, 2))[11:] > 1e-4).all()

    @every_splice
    def test_keys_and_values_of_spliced_layers_alone(self, splice: list) -> None:
        model, ids = llamba(splice=splice), tokens(3, 17)
        cache = model(ids, use_cache=True).cache
        keys = {i: slot.keys for i, slot in enumerate(cache.layers) if isinstance(getattr(slot, "keys", None), Tensor)}
        assert {i: k.shape for i, k in keys.items()} == {
            s["layer"]: (3, len(s["heads"]), 17, s["qk_width"]) for s in splice
        }
        assert cache.get_seq_length() == 17


class TestGenerate:
    @every_splice
    @pytest.mark.parametrize("beams", [1, 3])
    def test_cache_changes_nothing(self, splice: list, beams: int) -> None:
        model, ids = llamba(splice=splice), tokens(length=9)
        found = generate(model, ids, num_beams=beams)
        assert torch.equal(found, generate(model, ids, num_beams=beams, use_cache=False))
        assert beams == 1 or not torch.equal(found, generate(model, ids)), "these beams never left the greedy path"

    @every_splice
    @pytest.mark.parametrize("beams", [1, 3])
    def test_left_padded(self, splice: list, beams: int) -> None:
        model, rows = llamba(splice=splice), [tokens(1, n, seed=n)[0] for n in (5, 11)]
        together = generate(model, *pad(rows, "left"), num_beams=beams)
        for b, row in enumerate(rows):
            assert torch.equal(together[b], generate(model, row[None], num_beams=beams)[0])

    @every_splice
    def test_static_cache(self, splice: list) -> None:
        model, rows = llamba(splice=splice), [tokens(1, n, seed=n)[0] for n in (5, 11)]
        ids, mask = pad(rows, "left")
        static = generate(model, ids, mask, new=5, cache_implementation="static")
        assert torch.equal(static, generate(model, ids, mask, new=5))

    def test_goes_on_from_a_cache(self) -> None:
        model, ids = llamba(splice=SPLICES["first"]), tokens(length=9)
        cache = model(ids[:, :6], use_cache=True).cache
        assert torch.equal(generate(model, ids, cache=cache), generate(model, ids))


class TestSplice:
    @pytest.mark.parametrize("n_qk_heads", [1, 2, 4])
    def test_fresh_branch_changes_no_bit(self, n_qk_heads: int) -> None:
        splice = [llamba_site(0, [1, 3]), llamba_site(2, [0], init="random")]
        base = llamba(n_qk_heads=n_qk_heads)
        hybrid = llamba(n_qk_heads=n_qk_heads, splice=splice, fresh=True)
        batch = prompts((9, 14, 12))
        for mask in (None, batch.attention_mask):
            assert torch.equal(full(hybrid, batch.input_ids, mask), full(base, batch.input_ids, mask))
        assert torch.equal(generate(hybrid, batch.input_ids), generate(base, batch.input_ids))

    def test_trained_branch_changes_the_logits(self) -> None:
        for splice in SPLICES.values():
            assert (full(llamba(splice=splice), tokens()) - full(llamba(), tokens())).abs().max() > 0.05

    def test_plain_checkpoint_loads_with_the_branch_alone_missing(self, tmp_path: Path) -> None:
        base = llamba()
        base.save_pretrained(tmp_path)
        splice = [llamba_site(0, [1, 3]), llamba_site(2, [0], init="random")]
        hybrid, info = LlambaForCausalLM.from_pretrained(tmp_path, splice=splice, output_loading_info=True)
        new = {name for name, _ in hybrid.named_parameters() if ".mixer.attention." in name}
        assert len(new) == (5 + 1) + 5 and set(info["missing_keys"]) == new
        assert not info["unexpected_keys"] and not info["mismatched_keys"]
        assert hybrid.config.layer_types == ["hybrid", "linear_attention", "hybrid"]
        assert torch.equal(full(hybrid.eval(), tokens()), full(base, tokens()))

    @every_splice
    def test_round_trip(self, splice: list, tmp_path: Path) -> None:
        model = llamba(splice=splice)
        model.save_pretrained(tmp_path)
        loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is LlambaForCausalLM and loaded.config.splice == splice
        assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert torch.equal(full(loaded.eval(), tokens()), full(model, tokens()))

    @pytest.mark.parametrize("silenced", [(2,), (0, 3)])
    def test_replace_silences_its_heads_and_no_other(self, silenced: tuple[int, ...]) -> None:
        splice = [llamba_site(1, silenced, "replace")]
        whole = full(llamba(splice=splice), tokens())
        for head in range(4):
            model = llamba(splice=splice)
            own = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            model.backbone.layers[1].mixer.out_proj.weight.data[:, own] = 7.0
            for training in (False, True):
                assert torch.equal(full(model.train(training), tokens()), whole) == (head in silenced), head

    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_zero_columns_stay_zero_in_training(self, checkpointing: bool) -> None:
        model, ids = llamba(splice=[llamba_site(1, [1, 2], "replace")]).train(), tokens()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        weight, silent = model.backbone.layers[1].mixer.out_proj.weight, slice(HEAD_DIM, 3 * HEAD_DIM)
        weight.data[:, silent] = 0
        start = weight.detach().clone()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
        assert not weight[:, silent].any()
        assert (weight - start).abs()[:, :HEAD_DIM].min() > 0


class TestRows:
    @every_splice
    def test_rows_are_the_softmax_of_the_branch(self, splice: list) -> None:
        """They sum to 1 over the tokens up to the query, padding left out, and change no logit."""
        model, batch = llamba(splice=splice), prompts((9, 14, 12))
        asked = model(batch.input_ids, batch.attention_mask, use_cache=False, splice_queries=batch.query)
        assert torch.equal(asked.logits, full(model, batch.input_ids, batch.attention_mask))
        assert [r.shape for r in asked.splice_attentions] == [(3, len(s["heads"]), 1, 14) for s in splice]
        for rows in asked.splice_attentions:
            torch.testing.assert_close(rows.sum(-1), torch.ones_like(rows[..., 0]))
            assert not (rows * (1 - batch.attention_mask)[:, None, None]).any()

    @every_splice
    def test_checkpointing_keeps_gradients_of_loss_and_rows(self, splice: list) -> None:
        model, batch, found = llamba(splice=splice).train(), prompts((9, 14, 12)), []
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        for checkpointing in (False, True):
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            model.zero_grad()
            output = model(batch.input_ids, batch.attention_mask, labels=labels, splice_queries=batch.query)
            gold = [r[torch.arange(3), :, 0, batch.segment_end[:, 0]].clamp(min=1e-9) for r in output.splice_attentions]
            (output.loss - sum(g.log().sum() for g in gold)).backward()
            found.append({name: p.grad.clone() for name, p in model.named_parameters()})
        for name, gradient in found[0].items():
            torch.testing.assert_close(found[1][name], gradient, **CLOSE)
        assert all(g.abs().max() > 1e-6 for name, g in found[0].items() if ".attention." in name)

    def test_rows_with_a_cache_are_refused(self) -> None:
        model, queries = llamba(splice=SPLICES["first"]), torch.tensor([[20], [20]])
        with pytest.raises(ValueError, match=r"splice_queries.*use_cache=False"):
            model(tokens(), splice_queries=queries, use_cache=True)


def test_bfloat16_hybrid(tmp_path: Path) -> None:
    model, batch = llamba(splice=SPLICES["all"]), prompts((9, 14, 12))
    model.save_pretrained(tmp_path)
    half = LlambaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    for name, p in half.named_parameters():
        assert p.dtype == (torch.float32 if name.endswith(".D") else torch.bfloat16), name
    logits = full(half, batch.input_ids, batch.attention_mask)
    assert (logits - full(model, batch.input_ids, batch.attention_mask)).abs()[:, -1].max() < 0.5
    assert generate(half, batch.input_ids, batch.attention_mask, new=3).shape == (3, 3)
    assert half.backbone.layers[0].mixer.attention.qk_width == STATE
