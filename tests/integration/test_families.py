"""The battery: every family on a tiny random model. It loads, is measured, is spliced, trains, decodes, is exported.

What is compared with is transformers' own model, a naive path, or weights changed by hand; never a stored number.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import surgery.hybrid
import surgery.hybrid.attention as branch_module
from surgery.capture import Trace, record
from surgery.checkpoint import load_model
from surgery.errors import PlanError
from surgery.evaluate.scoring import ChoiceScores, choice_scores
from surgery.families import block_of, family_of, geometry_of, mixer_of, structure_of
from surgery.heads import Graft, HeadId, HeadSet, Interval, MixerSpec, Plan, ScoredHead
from surgery.hybrid.attention import SplicedAttention
from surgery.locate.sweep import READS, Sweep, Variant
from surgery.plan import check_in_range, make_plan
from surgery.recipe import Base, Optimizer, Train
from surgery.sizes import kv_bytes_per_token, own_kv_bytes_per_token, sizes_of, state_bytes
from surgery.splice import splice
from surgery.train.loop import Trainer, _adamw, _trainable, spliced_parameters
from tests.pico import (
    FAMILY_NAMES,
    SPLICED_FAMILIES,
    pad,
    pico_family,
    pico_tokenizer,
    prompts,
    randomise,
    tokens,
)

exporting = import_module("surgery.export")  # `surgery.export` itself is the function
LIBRARY = Path(surgery.hybrid.__file__).parent
REFUSED = tuple(sorted(set(FAMILY_NAMES) - set(SPLICED_FAMILIES)))
every_family = pytest.mark.parametrize("name", FAMILY_NAMES)
every_spliced = pytest.mark.parametrize("name", SPLICED_FAMILIES)
every_mode = pytest.mark.parametrize("mode", ["add", "replace"])
every_init = pytest.mark.parametrize("init", ["ssm", "random"])
CLOSE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-5}  # logits of these models are up to 30

# One of each kind of recurrence, in every grouping.
RECURRENCES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"mamba2-{g}-groups": ("mamba2", {"n_groups": g}) for g in (1, 2, 4)},
    **{f"bamba-{g}-groups": ("bamba", {"mamba_n_groups": g}) for g in (1, 4)},
    "mamba-groups-of-channels": ("mamba", {}),
    "mamba-channels": ("mamba", {"channels_per_head": 1}),
    "falcon_mamba-groups-of-channels": ("falcon_mamba", {}),
    "falcon_mamba-channels": ("falcon_mamba", {"channels_per_head": 1}),
    "falcon_h1-without-norm": ("falcon_h1", {"mamba_rms_norm": False}),
    "falcon_h1-with-norm": ("falcon_h1", {"mamba_rms_norm": True, "mamba_n_groups": 4}),
    **{name: (name, {}) for name in ("llamba", "zamba2", "nemotron_h")},
    "granite": ("granite", {"num_local_experts": 0}),  # grouped experts are fp32 only
}
# What changes which head is which.
SHAPES: dict[str, tuple[dict[str, Any], ...]] = {
    "mamba2": ({"n_groups": 1}, {"state_size": 4}, {"num_heads": 2, "head_dim": 32}, {"num_hidden_layers": 2}),
    "mamba": ({"channels_per_head": 8}, {"state_size": 8}, {"num_hidden_layers": 2}, {"conv_kernel": 3}),
    "falcon_mamba": ({"channels_per_head": 8}, {"state_size": 8}, {"num_hidden_layers": 2}),
    "llamba": ({"ssm_cfg": {"d_state": 4, "n_v_heads": 4, "n_qk_heads": 2, "chunk_size": 8}}, {"n_layer": 2}),
    "zamba2": (
        {"mamba_ngroups": 1},
        {"n_mamba_heads": 2},
        {"layers_block_type": ["linear_attention"] * 3 + ["hybrid"]},
    ),
    "bamba": ({"mamba_n_groups": 1}, {"attn_layer_indices": [2]}, {"num_key_value_heads": 4}),
    "granite": ({"mamba_n_groups": 1}, {"num_attention_heads": 2}, {"mamba_d_state": 4}),
    "nemotron_h": ({"n_groups": 1}, {"head_dim": 16}, {"mamba_num_heads": 2, "mamba_head_dim": 32}),
    "falcon_h1": ({"mamba_n_groups": 1}, {"mamba_d_state": 4}, {"head_dim": 16}),
    "llama": ({"num_key_value_heads": 4}, {"num_hidden_layers": 2}, {"head_dim": 16}),
    "qwen2": ({"num_key_value_heads": 4}, {"num_hidden_layers": 2}),
    "gpt_neox": ({"num_attention_heads": 2}, {"num_hidden_layers": 2}),
}


@cache
def base(name: str, **more: Any) -> Any:
    """A pico model to read; who changes it works on a copy."""
    return pico_family(name, **more).requires_grad_(False)


@cache
def sweep_of(name: str) -> Sweep:
    return Sweep(base(name), prompts((9, 14, 12)))


@torch.no_grad()
def logits(model: Any, ids: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
    return model(input_ids=ids, attention_mask=mask, **{"use_cache": False, **more}).logits


def plan_of(model: Any, mode: Any = "add", init: Any = "ssm") -> Plan:
    """Two heads of the first layer that can be spliced, and one of the last."""
    first, *_, last = family_of(model.config).sites(model.config)
    grafts = (
        Graft(first, (3, 1), mode, init, ("segment_end", "answer_token")),
        Graft(last, (2,), mode, init, ("answer_token",)),
    )
    return Plan("pico", geometry_of(model.config), grafts, seed=3)


@cache
def trained(name: str, mode: Any = "add", init: Any = "ssm") -> Any:
    """A hybrid as training could leave it: nothing in it is zero or one, but for the silenced columns."""
    model = splice(base(name), plan_of(base(name), mode, init)).requires_grad_(False)
    randomise(model, 7, keep=".out_proj." if mode == "replace" else None)
    model.get_input_embeddings().weight.mul_(0.1)  # or what comes next is what came last, whatever the mixers do
    return model


def cache_of(model: Any, output: Any) -> Any:
    return getattr(output, family_of(model.config).cache_argument)


def mixers(model: Any, ssm: bool | None = None) -> list[MixerSpec]:
    return [s for s in family_of(model.config).mixers(model.config) if ssm is None or s.is_ssm == ssm]


def shared(model: Any) -> set[frozenset[str]]:
    """Names of the base's weights that are one tensor."""
    groups: dict[int, set[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        groups.setdefault(value.data_ptr(), set()).add(name)
    return {frozenset(names) for names in groups.values() if len(names) > 1}


@every_family
class TestLayout:
    def test_load_gives_the_logits_of_transformers(self, name: str, tmp_path: Path) -> None:
        model, batch = base(name), prompts()
        model.save_pretrained(tmp_path)
        loaded = load_model(Base(model=str(tmp_path)))
        assert type(loaded) is type(model) and shared(loaded) == shared(model)
        for mask in (None, batch.attention_mask):
            assert torch.equal(logits(loaded, batch.input_ids, mask), logits(model, batch.input_ids, mask))

    def test_specs_are_the_modules_with_their_shapes(self, name: str) -> None:
        model = base(name)
        for spec in mixers(model):
            mixer, structure = model.get_submodule(spec.path), structure_of(spec)
            assert mixer is mixer_of(model, spec)
            assert any(m is mixer for m in block_of(model, spec.layer, spec).modules())
            assert structure.out_proj(mixer).in_features == spec.num_heads * spec.head_dim
            if spec.is_ssm:
                x, _, _ = _recurrence(model, spec, 5)
                assert x.x.shape == (2, 5, spec.num_heads, spec.head_dim)
                assert x.key.shape == x.query.shape == (2, 5, spec.num_groups, spec.state_size)
                assert mixer.conv1d.weight.shape[-1] == spec.conv_kernel
            elif hasattr(mixer, "k_proj"):
                assert mixer.k_proj.out_features == mixer.v_proj.out_features == spec.num_groups * spec.head_dim

    def test_no_mixer_is_left_out(self, name: str) -> None:
        """By what only a recurrence has, and by the classes' names."""
        model = base(name)
        ssm = {m for m in model.modules() if isinstance(getattr(m, "conv1d", None), nn.Conv1d)}
        attention = {m for m in model.modules() if type(m).__name__.endswith("Attention")}
        assert ssm == {mixer_of(model, spec) for spec in mixers(model, ssm=True)}
        assert attention == {mixer_of(model, spec) for spec in mixers(model, ssm=False)}
        names = [spec.name for spec in mixers(model)]
        assert len(set(names)) == len(names) > 0

    def test_slices_are_apart_and_cover_the_output(self, name: str) -> None:
        for spec in mixers(base(name)):
            found = [structure_of(spec).weight_slices(spec, h).out for h in range(spec.num_heads)]
            columns = [i for s in found for i in range(s.start, s.stop)]
            assert columns == list(range(structure_of(spec).out_proj(mixer_of(base(name), spec)).in_features))

    def test_geometry_tells_shapes_apart(self, name: str) -> None:
        found = [geometry_of(base(name).config)]
        assert geometry_of(pico_family(name, seed=5).config) == found[0]
        for change in ({"vocab_size": 67}, *SHAPES[name]):
            found.append(geometry_of(pico_family(name, **change).config))
        assert len(set(found)) == len(found)

    def test_cache_is_as_large_as_said(self, name: str) -> None:
        _assert_cache_is_as_large_as_said(base(name))


def _assert_cache_is_as_large_as_said(model: Any) -> None:
    """Bytes of every tensor in the cache, at two lengths, two prompts at once."""
    size = sizes_of(model)
    assert size.state_bytes == state_bytes(model.config)
    sites = getattr(model.config, "splice", None) or []
    assert size.kv_bytes_per_token == own_kv_bytes_per_token(model.config) + kv_bytes_per_token(sites)
    for length in (5, 11):
        with torch.no_grad():
            cache = cache_of(model, model(tokens(2, length), use_cache=True))
        held = 0
        for layer in cache.layers:
            for value in vars(layer).values():
                found = list(value.values()) if isinstance(value, dict) else [value]
                held += sum(x.numel() * x.element_size() for x in found if isinstance(x, Tensor) and x.ndim > 1)
        assert held == 2 * (size.state_bytes + size.kv_bytes(length))


@torch.no_grad()
def _recurrence(model: Any, spec: MixerSpec, length: int) -> tuple[Any, Tensor, Trace]:
    """The streams of a mixer, the output of its scan rebuilt by hidden attention, and what was recorded."""
    with record(model, [spec]) as trace:
        logits(model, tokens(2, length))
    structure, mixer = structure_of(spec), mixer_of(model, spec)
    streams = structure.streams(mixer, spec, trace.projected[spec.name])
    weights = structure.hidden_attention(mixer, spec, streams)
    if weights.shape[1] == spec.num_heads * spec.head_dim:  # a row for each channel
        mixed = torch.einsum("bits,bsi->bti", weights, streams.x.flatten(2)).view(streams.x.shape)
    else:
        mixed = torch.einsum("bhts,bshp->bthp", weights, streams.x)
    return streams, (mixed + structure.skip(mixer, streams.x)).flatten(2), trace


@pytest.mark.parametrize(("name", "more"), RECURRENCES.values(), ids=RECURRENCES.keys())
def test_hidden_attention_rebuilds_the_mixers_output(name: str, more: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64 where the models say fp32, so that an equality to 1e-9 can be asked for."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    monkeypatch.setattr(torch, "float32", torch.float64)
    model = pico_family(name, **more).double()
    specs = mixers(model, ssm=True)
    assert specs and (more.get("channels_per_head") != 1 or all(s.native_heads for s in specs))
    for spec in specs:
        streams, scan, trace = _recurrence(model, spec, 21)
        structure, mixer = structure_of(spec), mixer_of(model, spec)
        if streams.gate is not None:
            scan = scan * streams.gate
        torch.testing.assert_close(scan, trace.scan[spec.name], atol=1e-9, rtol=0)
        heads = scan
        if structure.norm_weight(mixer) is not None:
            multiplied = trace.projected[spec.name] * getattr(mixer, "mup_vector", 1)
            heads = mixer.norm(scan, multiplied[..., : scan.shape[-1]])
        torch.testing.assert_close(heads, trace.heads[spec.name], atol=1e-9, rtol=0)
        output = structure.out_proj(mixer)(heads)
        torch.testing.assert_close(output, trace.output[spec.name], atol=1e-9, rtol=0)


def assert_same(fast: list[ChoiceScores], naive: list[ChoiceScores]) -> None:
    assert len(fast) == len(naive) > 0
    for one, other in zip(fast, naive, strict=True):
        torch.testing.assert_close(one.margin, other.margin, atol=1e-4, rtol=0)
        assert torch.equal(one.correct, other.correct)


@every_family
class TestLocate:
    @pytest.mark.parametrize("context_only", [False, True])
    def test_ablation_equals_the_naive_one(self, name: str, context_only: bool) -> None:
        sweep = sweep_of(name)
        for spec in sweep.specs:
            fast = sweep.ablated(spec, context_only)
            assert_same(fast, sweep.ablated(spec, context_only, naive=True))
            assert context_only or all((s.margin - sweep.clean.margin).abs().max() > 1e-3 for s in fast)

    def test_at_the_query_equals_the_naive_one(self, name: str) -> None:
        sweep = sweep_of(name)
        heads = [head for spec in sweep.specs for head in spec.heads]
        variants = [Variant(ablate=(head,)) for head in heads]
        variants += [Variant(sharpen=((head, reads),)) for head in heads for reads in READS]
        together = Variant(
            ablate=(heads[0], heads[-1]), sharpen=((heads[1], "segment_end"), (heads[-2], "answer_token"))
        )
        fast = sweep.at_query([Variant(), *variants, together])
        assert_same(fast, sweep.at_query([Variant(), *variants, together], naive=True))
        torch.testing.assert_close(fast[0].margin, sweep.clean.margin, atol=1e-4, rtol=0)
        assert all((s.margin - sweep.clean.margin).abs().max() > 1e-3 for s in fast[1:])

    def test_ablation_is_zeroed_columns_of_that_layer(self, name: str) -> None:
        """The weight itself is changed, of this layer alone where layers share it."""
        sweep, model = sweep_of(name), copy.deepcopy(base(name))
        for spec in sweep.specs:
            out_proj, found = structure_of(spec).out_proj(mixer_of(model, spec)), []
            whole = out_proj.weight
            for head in range(spec.num_heads):
                columns = structure_of(spec).weight_slices(spec, head).out
                out_proj.weight = nn.Parameter(whole.clone(), requires_grad=False)
                out_proj.weight[:, columns] = 0
                changed = logits(model, sweep.batch.input_ids, sweep.batch.attention_mask)
                found.append(choice_scores(changed[:, -1], sweep.batch))
            out_proj.weight = whole
            assert_same(sweep.ablated(spec), found)


@every_spliced
class TestSplice:
    @every_init
    def test_add_is_the_base_bit_for_bit(self, name: str, init: str) -> None:
        model, batch = base(name), prompts((9, 14, 12))
        hybrid = splice(model, plan_of(model, "add", init))
        for mask in (None, batch.attention_mask):
            found, expected = (logits(m, batch.input_ids, mask) for m in (hybrid, model))
            assert torch.equal(found, expected) and found.isfinite().all()
        branches = [m for m in hybrid.modules() if isinstance(m, SplicedAttention)]
        assert len(branches) == 2
        for branch in branches:
            nn.init.normal_(branch.o_proj.weight)
            assert (logits(hybrid, batch.input_ids) - logits(model, batch.input_ids)).abs().max() > 0.05
            branch.o_proj.weight.data.zero_()

    @every_init
    def test_replace_silences_those_heads_and_no_other(self, name: str, init: str) -> None:
        model = base(name)
        plan = plan_of(model, "replace", init)
        hybrid = splice(model, plan)
        for graft in plan.grafts:
            ours, theirs = (structure_of(graft.site).out_proj(mixer_of(m, graft.site)) for m in (hybrid, model))
            for head, columns in _columns(graft.site):
                if head in graft.heads:
                    assert not ours.weight[:, columns].any() and theirs.weight[:, columns].any()
                else:
                    assert torch.equal(ours.weight[:, columns], theirs.weight[:, columns])
        site, silenced = plan.grafts[0].site, plan.grafts[0].heads
        with record(hybrid, [site]) as ours, record(model, [site]) as theirs:
            logits(hybrid, tokens())
            logits(model, tokens())
        for head, columns in _columns(site):
            found, expected = (t.heads[site.name][..., columns] for t in (ours, theirs))
            assert not found.any() if head in silenced else torch.equal(found, expected)

    def test_silenced_heads_stay_silent_in_training(self, name: str) -> None:
        model, plan = copy.deepcopy(trained(name, "replace")).train(), plan_of(base(name), "replace")
        parameters = _trainable(model, Train.model_validate({"sources": [KV], "trains": "all"}))
        optimizer = _adamw(model, parameters, Optimizer(weight_decay=0.1, lr=1e-2))
        for _ in range(3):
            optimizer.zero_grad()
            model(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
            optimizer.step()
        for graft in plan.grafts:
            before, after = (structure_of(graft.site).out_proj(mixer_of(m, graft.site)).weight
                             for m in (trained(name, "replace"), model))  # fmt: skip
            for head, columns in _columns(graft.site):
                moved = (after - before)[:, columns]
                assert not after[:, columns].any() if head in graft.heads else moved.abs().min() > 0

    @every_mode
    def test_the_bases_weights_are_not_edited(self, name: str, mode: str) -> None:
        """Nor its own, nor the copies but for silenced columns; what was one tensor still is."""
        model = base(name)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        plan = plan_of(model, mode)
        hybrid = splice(model, plan)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        silenced = {f"{g.site.path}.out_proj.weight" for g in plan.grafts} if mode == "replace" else set()
        copies = hybrid.state_dict()
        assert {k for k, v in before.items() if not torch.equal(copies[k], v)} == silenced
        assert not {v.data_ptr() for v in copies.values()} & {v.data_ptr() for v in model.state_dict().values()}
        assert shared(hybrid) == shared(model)
        assert name not in ("zamba2", "llamba") or shared(model)
        assert not silenced & {weight for group in shared(model) for weight in group}

    def test_a_step_changes_what_the_recipe_names(self, name: str, tmp_path: Path) -> None:
        model = pico_family(name, vocab_size=1024)
        plan = plan_of(model)
        hybrid = randomise(splice(model, plan), 7)
        before = {k: v.clone() for k, v in hybrid.state_dict().items()}
        optimizer = {"warmup": 0, "weight_decay": 0.1}
        section = Train.model_validate({"steps": 1, "trains": "new_heads", "sources": [KV], "optimizer": optimizer})
        Trainer(hybrid, pico_tokenizer(), section, 0, None, Accelerator(cpu=True), grafts=plan.grafts).run()
        moved = {k for k, v in hybrid.state_dict().items() if not torch.equal(v, before[k])}
        assert moved == {k for k in before if any(f"{g.site.path}.attention." in k for g in plan.grafts)}
        assert len(moved) == len(spliced_parameters(hybrid)) > 0

    @every_mode
    @every_init
    def test_cache_is_as_large_as_said(self, name: str, mode: str, init: str) -> None:
        _assert_cache_is_as_large_as_said(trained(name, mode, init))

    def test_geometry_is_the_bases(self, name: str) -> None:
        hybrid = trained(name)
        assert geometry_of(hybrid.config) == geometry_of(base(name).config)
        assert mixers(hybrid) == mixers(base(name)) and all(mixer_of(hybrid, s) for s in mixers(hybrid))


KV = {"task": "kv_retrieval", "rows": 1, "pairs": (2, 2), "weights": {"answer": 1.0, "attention": 1.0}}


def _columns(spec: MixerSpec) -> list[tuple[int, slice]]:
    """Each head with its columns of `out_proj`."""
    return [(head, structure_of(spec).weight_slices(spec, head).out) for head in range(spec.num_heads)]


@every_spliced
@every_init
class TestRows:
    def test_rows_are_those_that_attention_mixes_with(
        self, name: str, init: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Softmax of the queries and keys that reach attention, causal and without padding."""
        model, batch = copy.deepcopy(trained(name, "add", init)), prompts((9, 14, 12))
        model.config._attn_implementation = "eager"
        eager, seen = branch_module.eager_attention_forward, []

        def spy(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            mixed, weights = eager(module, query, key, value, *args, **kwargs)
            seen.append((query @ key.transpose(2, 3), weights))
            return mixed, weights

        monkeypatch.setattr(branch_module, "eager_attention_forward", spy)
        queries = torch.tensor([[6, 13, -1], [0, 5, 13], [2, 9, 13]])
        with torch.no_grad():
            given = {"attention_mask": batch.attention_mask, "use_cache": False, "splice_queries": queries}
            output = model(input_ids=batch.input_ids, **given)
        assert torch.equal(output.logits, logits(model, batch.input_ids, batch.attention_mask))
        real = batch.attention_mask.bool()
        for rows, (scores, weights) in zip(output.splice_attentions, seen[:2], strict=True):
            visible = torch.ones(14, 14).tril().bool() & real[:, None]
            expected = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
            for b, q in ((b, q) for b in range(3) for q in range(3)):
                t = int(queries[b, q])
                if t < 0 or not real[b, t]:
                    assert t >= 0 or not rows[b, :, q].any()
                    continue
                torch.testing.assert_close(rows[b, :, q], expected[b, :, t], atol=1e-5, rtol=0)
                torch.testing.assert_close(rows[b, :, q], weights[b, :, t], atol=1e-5, rtol=0)

    def test_gradients_pass_through_checkpointing(self, name: str, init: str) -> None:
        found = []
        for checkpointing in (False, True):
            model, batch = copy.deepcopy(trained(name, "add", init)).train().requires_grad_(True), prompts((9, 14, 12))
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            given = {"attention_mask": batch.attention_mask, "splice_queries": batch.query, "use_cache": False}
            rows = model(input_ids=batch.input_ids, **given).splice_attentions
            gold = [r[torch.arange(3), :, 0, batch.segment_end[:, 0]].clamp(min=1e-9).log() for r in rows]
            sum(g.sum() for g in gold).backward()
            found.append({k: p.grad for k, p in model.named_parameters() if p.grad is not None and p.grad.any()})
        plain, checkpointed = found
        own = "qk_proj.weight" if init == "ssm" and name in ("mamba", "falcon_mamba") else "qkv_proj.weight"
        queries = {f"{g.site.path}.attention.{part}" for g in plan_of(base(name)).grafts for part in ("scale", own)}
        assert queries <= set(plain) == set(checkpointed)
        assert any(".attention." not in name for name in plain), "the layers below"
        for key, gradient in plain.items():
            torch.testing.assert_close(checkpointed[key], gradient, atol=1e-5, rtol=1e-4)


def decoded(model: Any, ids: Tensor, borders: tuple[int, ...], mask: Tensor | None = None) -> Tensor:
    """(B,T,V) from cached forward passes over the pieces between the borders."""
    kept, found, start = None, [], 0
    argument = family_of(model.config).cache_argument
    for end in (*borders, ids.shape[1]):
        seen = None if mask is None else mask[:, :end]
        with torch.no_grad():
            given = {"attention_mask": seen, argument: kept, "use_cache": True}
            output = model(input_ids=ids[:, start:end], **given)
        kept, start = cache_of(model, output), end
        found.append(output.logits)
    return torch.cat(found, 1)


def generate(model: Any, ids: Tensor, mask: Tensor, **more: Any) -> Tensor:
    """The new tokens."""
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **more}
    return model.generate(input_ids=ids, attention_mask=mask, **settings)[:, ids.shape[1] :]


@every_spliced
@every_init
class TestDecode:
    @pytest.mark.parametrize("borders", [tuple(range(1, 21)), (1,), (9,), (2, 3, 12)])
    def test_cached_is_the_full_forward(self, name: str, init: str, borders: tuple[int, ...]) -> None:
        """Token by token, and in several tokens after a cache."""
        model, ids = trained(name, "replace" if len(borders) == 1 else "add", init), tokens()
        torch.testing.assert_close(decoded(model, ids, borders), logits(model, ids), **CLOSE)

    def test_left_padded_is_unpadded(self, name: str, init: str) -> None:
        model, rows = trained(name, "add", init), [tokens(1, n, seed=n)[0] for n in (9, 14, 6)]
        ids, mask = pad(rows, "left")  # a row of padding alone in the first piece, some in the second
        whole, pieces = logits(model, ids, mask), decoded(model, ids, (4, 10, 11, 12), mask)
        assert whole.isfinite().all()
        for b, row in enumerate(rows):
            alone = logits(model, row[None])[0]
            torch.testing.assert_close(whole[b, -len(row) :], alone, **CLOSE)
            torch.testing.assert_close(pieces[b, -len(row) :], alone, **CLOSE)

    def test_generate_left_padded_is_row_by_row(self, name: str, init: str) -> None:
        model, rows = trained(name, "add", init), [tokens(1, n, seed=n)[0] for n in (5, 11)]
        together = generate(model, *pad(rows, "left"))
        for b, row in enumerate(rows):
            alone = generate(model, row[None], torch.ones(1, len(row), dtype=torch.long))
            assert torch.equal(together[b], alone[0])
            longer = torch.cat([row, alone[0]])[None]  # and both are the argmax of a plain forward
            assert torch.equal(logits(model, longer)[0, len(row) - 1 : -1].argmax(-1), alone[0])

    def test_beams_need_no_cache(self, name: str, init: str) -> None:
        model, (ids, mask) = trained(name, "add", init), pad([tokens(1, n, seed=n)[0] for n in (5, 11)], "left")
        beams = generate(model, ids, mask, num_beams=3)
        assert torch.equal(beams, generate(model, ids, mask, num_beams=3, use_cache=False))
        assert torch.equal(beams[1], generate(model, ids[1:], mask[1:], num_beams=3)[0])
        assert not torch.equal(beams, generate(model, ids, mask)), "these beams never left the greedy path"


class TestRefusal:
    @pytest.mark.parametrize("name", REFUSED)
    def test_a_family_that_takes_no_splice(self, name: str) -> None:
        config, family = base(name).config, family_of(base(name).config)
        head = ScoredHead(HeadId(0, 1), "neither", "segment_end", {"query": Interval(0.0, 0.0, 0.0, 1)})
        heads = HeadSet("pico", "", geometry_of(config), (head,), (head,), "list", 0)
        graft = Graft(family.mixers(config)[0], (1,), "add", "ssm", ("segment_end",))
        assert family.sites(config) == ()
        for attempt in (
            lambda: make_plan(heads, config),
            lambda: splice(base(name), Plan("pico", geometry_of(config), (graft,), 0)),
        ):
            with pytest.raises(PlanError, match=rf"^base\.model: {config.model_type}\. ") as caught:
                attempt()
            assert family.refuses in str(caught.value) and "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("name", "head"),
        [("zamba2", "L1H0"), ("zamba2", "L1A0"), ("bamba", "L1A2"), ("granite", "L1A0"), ("nemotron_h", "L2A1")],
    )
    def test_a_layer_with_keys_and_values_of_its_own(self, name: str, head: str) -> None:
        model = base(name)
        where = HeadId.parse(head)
        site = next(s for s in mixers(model) if s.name == where.mixer)
        graft = Graft(site, (where.head,), "add", "ssm", ("segment_end",))
        layers = [s.layer for s in family_of(model.config).sites(model.config)]
        for named, attempt in (
            (head, lambda: check_in_range(where, model.config)),
            (site.name, lambda: splice(model, Plan("pico", geometry_of(model.config), (graft,), 0))),
        ):
            with pytest.raises(PlanError, match=rf"{named}\. .*keys and values") as caught:
                attempt()
            assert str(layers) in str(caught.value) and "\n" not in str(caught.value)

    def test_a_plan_for_another_model(self) -> None:
        plan = plan_of(base("bamba"))
        with pytest.raises(PlanError, match=r"geometry"):
            splice(base("mamba2"), plan)


# Runs the library's own check on several folders, in one process that cannot import the library.
RELOAD = """
import sys
script, *triples = sys.argv[1:]
while triples:
    sys.argv, triples = ["-c", *triples[:3]], triples[3:]
    exec(script)
"""


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Tensor]]]:
    """By family: an exported folder, and what it gives where `surgery` is not installed."""
    there, ids = tmp_path_factory.mktemp("exports"), tokens(2, 24)
    save_file({"ids": ids}, there / "ids")
    arguments: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "verify", lambda *_: {})
        for name in SPLICED_FAMILIES:
            exporting.export(trained(name, "replace"), pico_tokenizer(), there / name, card="A card.")
            arguments += [str(there / name), str(there / "ids"), str(there / f"{name}.found")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(there / "modules")}
    command = [sys.executable, "-c", RELOAD, exporting._RELOAD, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=there, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: (there / name, load_file(there / f"{name}.found")) for name in SPLICED_FAMILIES}


@every_spliced
class TestExport:
    def test_reloaded_without_surgery_it_is_the_same(self, name: str, exports: Any) -> None:
        _, found = exports[name]
        model, ids = trained(name, "replace"), tokens(2, 24)
        assert torch.equal(found["logits"], logits(model, ids))
        end = pico_tokenizer().eos_token_id
        text = model.generate(ids[:1], max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=end)
        assert torch.equal(found["text"], text) and text.shape[1] > 24

    def test_modelling_files_are_the_librarys(self, name: str, exports: Any) -> None:
        folder, _ = exports[name]
        shipped = {path.name: path.read_bytes() for path in folder.glob("*.py")}
        own = sys.modules[type(trained(name)).__module__]
        assert Path(own.__file__).name in shipped and {"attention.py", "mixins.py"} <= set(shipped)
        for file, content in shipped.items():
            assert content == (LIBRARY / file).read_bytes(), file
        maps = json.loads((folder / "config.json").read_text())["auto_map"]
        assert set(maps) == {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}

    def test_loads_here_with_one_tensor_where_one_was(self, name: str, exports: Any) -> None:
        folder, _ = exports[name]
        model, loaded = trained(name, "replace"), load_model(Base(model=str(folder))).requires_grad_(False)
        assert loaded.config.splice == model.config.splice and shared(loaded) == shared(model)
        assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))
        assert torch.equal(decoded(loaded, tokens(), (9,)), decoded(model, tokens(), (9,)))
