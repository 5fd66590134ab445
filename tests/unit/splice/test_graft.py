"""Initial values of a branch: copies of the head's own streams, a control that the seed decides, a measured gap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

import surgery.hybrid.modeling_hybrid as branch_module
from surgery.errors import PlanError
from surgery.hybrid.modeling_hybrid import SplicedAttention
from surgery.models.hooks import record
from surgery.models.lookup import mixer_of, structure_of
from surgery.recipe import Splice
from surgery.splice.graft import splice_model, step_zero_gap
from surgery.types import Plan
from tests.support.battery import base, columns, logits, plan_of, spliced, stays_fp32
from tests.support.cases import each
from tests.support.pico import SPLICED_FAMILIES, pico_family, prompts, tokens

every_spliced = each("name", SPLICED_FAMILIES)
every_mode = each("mode", ["add", "replace"])


def branches(model: Any) -> list[SplicedAttention]:
    return [m for m in model.modules() if isinstance(m, SplicedAttention)]


def attended(model: Any, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values (B,H,T,width) of each branch, from below."""
    eager, seen = branch_module.eager_attention_forward, []

    def spy(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(module, SplicedAttention):
            seen.append((query, key, value))
        return eager(module, query, key, value, *args, **kwargs)

    monkeypatch.setattr(branch_module, "eager_attention_forward", spy)
    model.config._attn_implementation = "eager"
    logits(model, ids)
    return seen


class TestCopies:
    @every_spliced
    def test_query_key_and_value_are_the_heads_own_streams(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """C is the query, B the key, x the value, as the recurrence sees them, each head with its group's."""
        model, plan, ids = base(name), plan_of(base(name)), tokens()
        with record(model, [g.site for g in plan.grafts]) as trace:
            logits(model, ids)
        for graft, found in zip(plan.grafts, attended(spliced(model), ids, monkeypatch), strict=True):
            mixer, site = mixer_of(model, graft.site), graft.site
            streams = structure_of(site).streams(mixer, site, trace.projected[site.name])
            groups, heads = [site.group_of(h) for h in graft.heads], list(graft.heads)
            expected = (streams.query[:, :, groups], streams.key[:, :, groups], streams.x[:, :, heads])
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours.transpose(1, 2), theirs, atol=1e-5, rtol=1e-5)

    @every_spliced
    def test_gate_is_the_heads_own(self, name: str) -> None:
        """With the bias that Llamba adds behind its projection."""
        model, plan, ids = base(name), plan_of(base(name)), tokens()
        hybrid = spliced(model)
        with record(hybrid, [g.site for g in plan.grafts]) as trace:
            logits(hybrid, ids)
        for graft, branch in zip(plan.grafts, branches(hybrid), strict=True):
            structure, mixer, seen = structure_of(graft.site), mixer_of(hybrid, graft.site), []
            handle = mixer.in_proj.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
            logits(hybrid, ids)
            handle.remove()
            rows = [structure.weight_slices(graft.site, head).gate for head in graft.heads]
            expected = torch.cat([trace.projected[graft.site.name][..., r] for r in rows], dim=-1)
            bias = structure.gate_bias(mixer)
            if bias is not None:
                expected = expected + torch.cat([bias[structure.weight_slices(graft.site, h).out] for h in graft.heads])
            torch.testing.assert_close(branch.gate_proj(seen[0]), expected, atol=1e-5, rtol=1e-5)

    @every_spliced
    def test_replace_starts_from_the_heads_own_columns(self, name: str) -> None:
        """With the weight of the gated norm folded in, where there is one: the branch's norm has none."""
        model, plan = base(name), plan_of(base(name), "replace")
        for graft, branch in zip(plan.grafts, branches(spliced(model, "replace")), strict=True):
            mixer, structure = mixer_of(model, graft.site), structure_of(graft.site)
            own = dict(columns(graft.site))
            norm = structure.norm_weight(mixer)
            parts = []
            for head in graft.heads:
                block = structure.out_proj(mixer).weight[:, own[head]]
                parts.append(block if norm is None else block * norm[own[head]])
            assert torch.equal(branch.o_proj.weight, torch.cat(parts, dim=1))

    @every_spliced
    def test_what_is_copied_is_divided_by_no_less_than_the_norm_behind_the_ssm_divides_by(self, name: str) -> None:
        """A norm for each head would give reads of nothing the size of reads of everything."""
        model, plan, ids = base(name), plan_of(base(name), "replace"), tokens()
        with record(model, [g.site for g in plan.grafts]) as trace:
            logits(model, ids)
        for graft, branch in zip(plan.grafts, branches(spliced(model, "replace")), strict=True):
            structure, spec = structure_of(graft.site), graft.site
            scan, heads = trace.scan[spec.name], trace.heads[spec.name]
            norm = structure.norm_weight(mixer_of(model, spec))
            if norm is None:
                assert branch.norm_eps == 1.0
                continue
            slices = [structure.weight_slices(spec, head) for head in graft.heads]
            gated = [scan[..., s.out] * F.silu(trace.projected[spec.name][..., s.gate]) * norm[s.out] for s in slices]
            squares = [(x / heads[..., s.out]).square() for x, s in zip(gated, slices, strict=True)]
            assert min(x.min() for x in squares) < branch.norm_eps < max(x.max() for x in squares)


class TestRandom:
    @staticmethod
    def _values(seed: int, name: str = "mamba2") -> list[dict[str, Tensor]]:
        plan = plan_of(base(name), init="random")
        hybrid = splice_model(base(name), Plan(plan.base, plan.geometry, plan.grafts, seed))
        return [b.state_dict() for b in branches(hybrid)]

    def test_depends_on_seed_and_layer_alone(self) -> None:
        torch.manual_seed(1)
        one = self._values(0)
        torch.manual_seed(2)
        again, other = self._values(0), self._values(1)
        for mine, same, another in zip(one, again, other, strict=True):
            for key, value in mine.items():
                assert torch.equal(value, same[key])
                drawn = key.endswith("weight") and bool(value.any())  # all but the output projection
                assert torch.equal(value, another[key]) != drawn, key
        rows = min(len(values["qkv_proj.weight"]) for values in one)
        assert not torch.equal(*(values["qkv_proj.weight"][:rows] for values in one)), "layers differ"

    @each("name", SPLICED_FAMILIES)
    def test_has_unit_variance_per_fan_in_and_a_scaled_query(self, name: str) -> None:
        section = Splice(init="random", random_width=64)
        hybrid = splice_model(base(name), plan_of(base(name), init="random"), section)
        for branch in branches(hybrid):
            weight = branch.qkv_proj.weight
            assert float(weight.detach().std()) == pytest.approx(weight.shape[1] ** -0.5, rel=0.15)
            assert branch.scale.tolist() == pytest.approx([64**-0.5] * branch.num_heads)
            assert branch.gate_proj is None and not branch.o_proj.weight.any()
            assert all(not p.any() for n, p in branch.named_parameters() if n.endswith("bias"))


class TestGap:
    @every_mode
    @each("name", SPLICED_FAMILIES)
    def test_all_but_the_splice_is_kept_or_the_run_stops(self, name: str, mode: str) -> None:
        """What the splice does not change on purpose: embeddings or a head that differ are found."""
        model, plan, batch = base(name), plan_of(base(name), mode), prompts()
        prompt = batch.input_ids, batch.attention_mask
        hybrid = spliced(model, mode)
        step_zero_gap(model, hybrid, plan, *prompt)
        for module in (hybrid.get_input_embeddings(), hybrid.get_output_embeddings()):
            weight = module.weight
            kept = weight.detach().clone()
            weight.data += 0.3 * torch.randn_like(weight)
            with pytest.raises(PlanError, match=r"the hybrid: its logits differ from the base's by up to"):
                step_zero_gap(model, hybrid, plan, *prompt)
            weight.data = kept
        step_zero_gap(model, hybrid, plan, *prompt)

    def test_is_the_divergence_over_real_tokens(self) -> None:
        one, other, batch = base("mamba2"), spliced(base("mamba2")), prompts()
        for branch in branches(other):
            torch.nn.init.normal_(branch.o_proj.weight)
        gap, parts = step_zero_gap(one, other, plan_of(one), batch.input_ids, batch.attention_mask), []
        for row, mask in zip(batch.input_ids, batch.attention_mask, strict=True):
            a, b = (logits(m, row[mask.bool()][None])[0].double() for m in (one, other))
            parts.append(
                (F.kl_div(b.log_softmax(-1), a.log_softmax(-1), log_target=True, reduction="none").sum(-1), a - b)
            )
        assert gap.kl == pytest.approx(float(torch.cat([kl for kl, _ in parts]).mean()), rel=1e-3)
        assert gap.max_logit == pytest.approx(max(float(d.abs().max()) for _, d in parts), rel=1e-3)


@each("dtype", [torch.float32, torch.bfloat16])
def test_experts_stay_those_of_the_base(dtype: torch.dtype, tmp_path: Path) -> None:
    """Nemotron-H routes by a buffer that checkpoints store, and from transformers 5.24 on by an fp32 weight."""
    base = pico_family("nemotron_h")
    base.model.layers[4].mixer.gate.e_score_correction_bias.normal_()
    base.save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype)
    hybrid = spliced(model)
    hybrid.save_pretrained(tmp_path / "hybrid")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid", dtype=dtype)
    bias, weight = "model.layers.4.mixer.gate.e_score_correction_bias", "model.layers.4.mixer.gate.weight"
    for other in (hybrid, loaded):
        assert torch.equal(other.get_buffer(bias), model.get_buffer(bias))
        assert other.get_parameter(weight).dtype == model.get_parameter(weight).dtype
        assert torch.equal(logits(other, tokens()), logits(model, tokens()))


@every_spliced
def test_bfloat16_keeps_the_recurrence_in_fp32(name: str) -> None:
    """Where transformers' base was loaded in bf16: `A_log`, `dt_bias` and `D` of the hybrid are fp32."""
    model = pico_family(name).to(torch.bfloat16)
    hybrid = spliced(model)
    for key, p in hybrid.named_parameters():
        assert p.dtype == (torch.float32 if stays_fp32(key) else torch.bfloat16), key
    found = logits(hybrid, tokens())
    assert found.isfinite().all()
