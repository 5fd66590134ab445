"""The whole hybrid: decoding equals the full forward however it is fed, and splicing does what it says and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surgery.hybrid import Mamba2HybridConfig, Mamba2HybridForCausalLM
from tests.support.loops import for_each
from tests.support.pico import (
    HEAD_DIM,
    pad,
    pico_base,
    pico_hybrid,
    pico_site,
    prompts,
    random_site,
    tokens,
)

SPLICES = {
    "first": [pico_site(0, [1, 3])],
    "middle": [pico_site(1, [2])],
    "replace": [pico_site(1, [2], "replace")],
    "several": [pico_site(0, [1, 3]), random_site(2, [0], "replace")],
    "all": [pico_site(0, [0]), pico_site(1, [1, 2], "replace"), random_site(2, [3])],
}
every_splice = for_each("splice", SPLICES)
every_implementation = for_each("implementation", ["eager", "sdpa"])
every_grouping = for_each("n_groups", [1, 2, 4])
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
    @for_each("border", [1, 2, 9])
    def test_several_tokens_after_a_prefix(self, splice: list, implementation: str, border: int) -> None:
        model, ids = pico_hybrid(splice, attn_implementation=implementation), tokens()
        first = model(ids[:, :border], use_cache=True)
        second = model(ids[:, border:], cache=first.cache, use_cache=True)
        torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), full(model, ids), **CLOSE)

    @every_splice
    @every_implementation
    @for_each("side", ["left", "right"])
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
    @every_implementation
    def test_causality(self, splice: list, implementation: str) -> None:
        model, ids = pico_hybrid(splice, attn_implementation=implementation), tokens()
        changed = ids.clone()
        changed[:, 11] = (ids[:, 11] + 1) % 50 + 3
        before, after = full(model, ids), full(model, changed)
        torch.testing.assert_close(before[:, :11], after[:, :11], atol=1e-6, rtol=0)
        assert ((before - after).abs().amax((0, 2))[11:] > 1e-4).all()


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


class TestIdentity:
    @every_grouping
    @for_each("splice", [[pico_site(1, [2])], [pico_site(0, [1, 3]), random_site(2, [0, 3])]])
    def test_fresh_branch_changes_no_bit(self, splice: list, n_groups: int) -> None:
        base, hybrid = pico_base(n_groups=n_groups), pico_hybrid(splice, fresh=True, n_groups=n_groups)
        batch = prompts((9, 14, 12))
        for mask in (None, batch.attention_mask):
            assert torch.equal(full(hybrid, batch.input_ids, mask), full(base, batch.input_ids, mask))
        assert torch.equal(generate(hybrid, batch.input_ids), generate(base, batch.input_ids))

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
    @for_each("silenced", [(2,), (0, 3)])
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

    @for_each("checkpointing", [False, True])
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

    @for_each("keywords", [{"use_reentrant": True}, None])
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
