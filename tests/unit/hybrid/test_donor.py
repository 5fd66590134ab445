"""Attention that was a Transformer's: it computes what the donor computes, in a head, in a layer, in a cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surgery.errors import PlanError
from surgery.hybrid.modeling_hybrid import SplicePass
from surgery.models.donors import donor_mixers
from surgery.models.loading import load_model
from surgery.models.lookup import mixer_of
from surgery.recipe import Base
from surgery.splice.graft import splice_model
from surgery.types import Plan
from tests.support.cases import each
from tests.support.pico import HIDDEN, pico_family, prompts, tokens
from tests.support.teachers import plan_for, section, teacher_of

SCALED = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 16}


def donor_output(teacher, layer: int, x_BTD: Tensor, heads: list[int] | None) -> Tensor:
    """What the teacher's own attention puts out; of some heads by the input of its output projection."""
    spec = donor_mixers(teacher.config)[layer]
    mixer = teacher.get_submodule(spec.path)
    rotary = teacher.base_model.rotary_emb(x_BTD, torch.arange(x_BTD.shape[1])[None])
    causal = torch.full((x_BTD.shape[1],) * 2, torch.finfo(x_BTD.dtype).min).triu(1)[None, None]
    out = mixer.dense if spec.kind == "neox_attention" else mixer.o_proj
    seen = []
    handle = out.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        whole = mixer(x_BTD, attention_mask=causal, position_embeddings=rotary)[0]
    finally:
        handle.remove()
    if heads is None:
        return whole
    columns = [slice(h * spec.head_dim, (h + 1) * spec.head_dim) for h in heads]
    return sum(seen[0][..., c] @ out.weight[:, c].T for c in columns)


def branch_output(hybrid, plan: Plan, x_BTD: Tensor) -> Tensor:
    causal = torch.full((x_BTD.shape[1],) * 2, torch.finfo(x_BTD.dtype).min).triu(1)[None, None]
    return mixer_of(hybrid, plan.grafts[0].site).attention(x_BTD, None, SplicePass(causal=causal))[0]


@each("name", ["llama", "qwen2", "gpt_neox"])
@torch.no_grad()
def test_heads_compute_what_the_donors_do(name: str) -> None:
    base, teacher, x = pico_family("mamba2"), teacher_of(name), torch.randn(2, 11, HIDDEN)
    chosen = section({"L1H3": "L2H2", "L1H0": "L2H1"}, mode="replace")
    plan = plan_for(base, teacher, chosen, "L1H3", "L1H0")
    hybrid = splice_model(base, plan, chosen, teacher)
    torch.testing.assert_close(branch_output(hybrid, plan, x), donor_output(teacher, 2, x, [2, 1]))


class TestLayers:
    @torch.no_grad()
    @pytest.mark.parametrize(("name", "more"), [("llama", {}), ("qwen2", {}), ("llama", {"rope_parameters": SCALED})])
    def test_a_layer_computes_what_the_donor_does(self, name: str, more: dict) -> None:
        base, teacher, x = pico_family("llamba"), teacher_of(name, **more), torch.randn(2, 40, HIDDEN)
        chosen = section({"L1H0": "L2H0"}, mode="replace", unit="layer")
        plan = plan_for(base, teacher, chosen, "L1H0")
        hybrid = splice_model(base, plan, chosen, teacher)
        torch.testing.assert_close(branch_output(hybrid, plan, x), donor_output(teacher, 2, x, None))

    @pytest.mark.parametrize(
        ("more", "message"),
        [({"intermediate_size": 40}, "mlp"), ({"hidden_act": "gelu"}, "hidden_act: gelu.*The base's MLP has silu")],
    )
    def test_another_mlp_is_refused(self, more: dict, message: str) -> None:
        base, teacher = pico_family("llamba"), teacher_of("llama", **more)
        chosen = section(mode="replace", unit="layer", with_block=True)
        with pytest.raises(PlanError, match=message):
            splice_model(base, plan_for(base, teacher, chosen, "L1H0"), chosen, teacher)

    def test_a_sliding_window_is_refused(self) -> None:
        windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
        base, teacher = pico_family("llamba"), teacher_of("qwen2", **windows)
        for layer, message in ((1, None), (2, "splice.teacher: layer 2: sliding window of 4 tokens")):
            chosen = section({"L1H0": f"L{layer}H0"}, mode="replace", unit="layer")
            plan = plan_for(base, teacher, chosen, "L1H0")
            if message is None:
                splice_model(base, plan, chosen, teacher)
            else:
                with pytest.raises(PlanError, match=message):
                    splice_model(base, plan, chosen, teacher)


@torch.no_grad()
@pytest.mark.parametrize(("base", "fields"), [("llamba", {"unit": "layer"}), ("mamba", {}), ("zamba2", {})])
def test_cached_decode_is_the_forward_padded_or_not(base: str, fields: dict) -> None:
    model, teacher, batch = pico_family(base), teacher_of("llama"), prompts([9, 14])
    chosen = section(mode="replace", **fields)
    hybrid = splice_model(model, plan_for(model, teacher, chosen, "L0H1"), chosen, teacher)
    padded = hybrid.generate(batch.input_ids, attention_mask=batch.attention_mask, max_new_tokens=5, do_sample=False)
    for row, mask, given in zip(padded, batch.attention_mask, batch.input_ids, strict=True):
        alone = hybrid.generate(given[mask.bool()][None], max_new_tokens=5, do_sample=False)[0]
        assert torch.equal(row[-5:], alone[-5:])
    ids = tokens(2, 12)
    for mask in (None, torch.ones(2, 8)):  # positions are counted from the mask, and without one from the cache
        first = hybrid(ids[:, :8], attention_mask=mask, use_cache=True)
        rest = hybrid(ids[:, 8:], use_cache=True, cache=first.cache).logits
        torch.testing.assert_close(rest, hybrid(ids).logits[:, 8:], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_transplant_survives_saving(tmp_path) -> None:
    base, teacher, ids = pico_family("llamba"), teacher_of("llama", rope_parameters=SCALED), tokens(2, 40)
    chosen = section(mode="replace", unit="layer")
    hybrid = splice_model(base, plan_for(base, teacher, chosen, "L1H0"), chosen, teacher)
    hybrid.save_pretrained(tmp_path)
    assert torch.equal(load_model(Base(model=str(tmp_path)))(ids).logits, hybrid(ids).logits)
