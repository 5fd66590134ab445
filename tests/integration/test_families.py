"""The battery, first half: every family on a tiny random model loads, is described rightly, and is measured rightly.

What is compared with is transformers' own model, a naive path, or weights changed by hand; never a stored number. The
second half, in `test_family_hybrids.py`, splices.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surgery.data.ranking import choice_scores
from surgery.errors import PlanError
from surgery.locate.ablation import Ablation
from surgery.locate.ablation_sweep import Variant, ablate, change_at_query
from surgery.locate.clean_run import CleanRun, run_clean
from surgery.models.hooks import ActivationCache, record
from surgery.models.loading import load_model
from surgery.models.lookup import block_of, family_of, geometry_of, mixer_of, structure_of
from surgery.recipe import Base
from surgery.splice.graft import splice_model
from surgery.splice.plan import check_in_range, make_plan
from surgery.types import READS, Graft, HeadId, HeadSet, Interval, MixerSpec, Plan, ScoredHead
from tests.support.battery import (
    assert_cache_is_as_large_as_said,
    base,
    columns,
    every_family,
    logits,
    mixers,
    plan_of,
    shared,
)
from tests.support.oracles import assert_same, naive_ablate, naive_change_at_query
from tests.support.pico import FAMILY_NAMES, SPLICED_FAMILIES, pico_family, prompts, tokens

REFUSED = tuple(sorted(set(FAMILY_NAMES) - set(SPLICED_FAMILIES)))

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
    **{name: (name, {}) for name in ("llamba", "zamba2")},
    # Without experts: grouped ones are fp32 only.
    "nemotron_h": ("nemotron_h", {"layers_block_type": ["linear_attention", "mlp", "full_attention"]}),
    "granite": ("granite", {"num_local_experts": 0}),
}
# What changes which head is which.
SHAPES: dict[str, tuple[dict[str, Any], ...]] = {
    "mamba2": ({"n_groups": 1}, {"state_size": 4}, {"num_heads": 2, "head_dim": 32}, {"num_hidden_layers": 2}),
    "mamba2attn": ({"attn_layer_idx": [2]}, {"state_size": 4}, {"num_hidden_layers": 3}),
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
def run_of(name: str) -> CleanRun:
    return run_clean(base(name), prompts((9, 14, 12)))


@every_family
def test_it_loads_and_is_described_as_it_is(name: str, tmp_path: Path) -> None:
    """Logits are those of transformers; specs are the modules, with their shapes; no mixer is left out."""
    model, batch = base(name), prompts()
    model.save_pretrained(tmp_path)
    loaded = load_model(Base(model=str(tmp_path)))
    assert type(loaded) is type(model) and shared(loaded) == shared(model)
    for mask in (None, batch.attention_mask):
        assert torch.equal(logits(loaded, batch.input_ids, mask), logits(model, batch.input_ids, mask))

    for spec in mixers(model):
        mixer, structure = model.get_submodule(spec.path), structure_of(spec)
        assert mixer is mixer_of(model, spec)
        assert any(m is mixer for m in block_of(model, spec.layer, spec).modules())
        width = structure.out_proj(mixer).in_features
        assert width == spec.num_heads * spec.head_dim
        assert [i for _, own in columns(spec) for i in range(own.start, own.stop)] == list(range(width))
        if spec.is_ssm:
            x, _, _ = _recurrence(model, spec, 5)
            assert x.x.shape == (2, 5, spec.num_heads, spec.head_dim)
            assert x.key.shape == x.query.shape == (2, 5, spec.num_groups, spec.state_size)
            assert mixer.conv1d.weight.shape[-1] == spec.conv_kernel
        elif hasattr(mixer, "k_proj"):
            assert mixer.k_proj.out_features == mixer.v_proj.out_features == spec.num_groups * spec.head_dim

    ssm = {m for m in model.modules() if isinstance(getattr(m, "D", None), nn.Parameter)}
    attention = {m for m in model.modules() if type(m).__name__.endswith("Attention")}
    assert ssm == {mixer_of(model, spec) for spec in mixers(model, ssm=True)}
    assert attention == {mixer_of(model, spec) for spec in mixers(model, ssm=False)}
    names = [spec.name for spec in mixers(model)]
    assert len(set(names)) == len(names) > 0
    assert_cache_is_as_large_as_said(model)

    geometries = [geometry_of(model.config)]
    assert geometry_of(pico_family(name, seed=5).config) == geometries[0]
    for change in ({"vocab_size": 67}, *SHAPES.get(name, ())):
        geometries.append(geometry_of(pico_family(name, **change).config))
    assert len(set(geometries)) == len(geometries)


@torch.no_grad()
def _recurrence(model: Any, spec: MixerSpec, length: int) -> tuple[Any, Tensor, ActivationCache]:
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


def test_hidden_attention_rebuilds_the_mixers_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64 where the models say fp32, so that an equality to 1e-9 can be asked for."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    monkeypatch.setattr(torch, "float32", torch.float64)
    for case, (name, more) in RECURRENCES.items():
        model = pico_family(name, **more).double()
        specs = mixers(model, ssm=True)
        assert specs and (more.get("channels_per_head") != 1 or all(s.native_heads for s in specs)), case
        for spec in specs:
            streams, scan, trace = _recurrence(model, spec, 21)
            structure, mixer = structure_of(spec), mixer_of(model, spec)
            if streams.gate is not None:
                scan = scan * streams.gate
            heads = scan
            if structure.norm_weight(mixer) is not None:
                multiplied = trace.projected[spec.name] * getattr(mixer, "mup_vector", 1)
                heads = mixer.norm(scan, multiplied[..., : scan.shape[-1]])
            output = structure.out_proj(mixer)(heads)
            for found, recorded in ((scan, trace.scan), (heads, trace.heads), (output, trace.output)):
                apart = (found - recorded[spec.name]).abs().max()
                assert apart < 1e-9, (case, spec.name)


@every_family
def test_ablation_equals_the_naive_one(name: str) -> None:
    """Everywhere and over the context alone, of heads of several layers, and as columns that are zeroed by hand."""
    run, model = run_of(name), copy.deepcopy(base(name))
    for spec in run.specs:
        single = [[head] for head in spec.heads]
        context = Ablation("context")
        assert_same(ablate(run, single, context), naive_ablate(run, single, context))
        everywhere = ablate(run, single, Ablation("everywhere"))
        assert_same(everywhere, naive_ablate(run, single, Ablation("everywhere")))
        assert all((s.margin - run.scores.margin).abs().max() > 1e-3 for s in everywhere)
        # The weight itself is changed, of this layer alone where layers share it.
        out_proj, found = structure_of(spec).out_proj(mixer_of(model, spec)), []
        whole = out_proj.weight
        for _, own in columns(spec):
            out_proj.weight = nn.Parameter(whole.clone(), requires_grad=False)
            out_proj.weight[:, own] = 0
            changed = logits(model, run.batch.input_ids, run.batch.attention_mask)
            found.append(choice_scores(changed[:, -1], run.batch))
        out_proj.weight = whole
        assert_same(ablate(run, single), found)
    heads = [head for spec in run.specs for head in spec.heads]
    sets = [[heads[0], heads[-1]], heads[1:-1]]
    assert_same(ablate(run, sets, Ablation(fill="mean")), naive_ablate(run, sets, Ablation(fill="mean")))


@every_family
def test_a_change_at_the_query_equals_the_naive_one(name: str) -> None:
    run = run_of(name)
    heads = [head for spec in run.specs for head in spec.heads]
    variants = [Variant(ablate=(head,)) for head in heads]
    variants += [Variant(oracle=((head, reads),)) for head in heads for reads in READS]
    together = Variant(ablate=(heads[0], heads[-1]), oracle=((heads[1], "segment_end"), (heads[-2], "answer_token")))
    fast = change_at_query(run, [Variant(), *variants, together])
    assert_same(fast, naive_change_at_query(run, [Variant(), *variants, together]))
    torch.testing.assert_close(fast[0].margin, run.scores.margin, atol=1e-4, rtol=0)
    assert all((s.margin - run.scores.margin).abs().max() > 1e-3 for s in fast[1:])


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_takes_no_splice_is_refused(name: str) -> None:
    config, family = base(name).config, family_of(base(name).config)
    head = ScoredHead(HeadId(0, 1), "neither", "segment_end", {"query": Interval(0.0, 0.0, 0.0, 1)})
    heads = HeadSet("pico", "", geometry_of(config), (head,), (head,), "list", 0)
    graft = Graft(family.mixers(config)[0], (1,), "add", "ssm", ("segment_end",))
    assert family.sites(config) == ()
    for attempt in (
        lambda: make_plan(heads, config),
        lambda: splice_model(base(name), Plan("pico", geometry_of(config), (graft,), 0)),
    ):
        with pytest.raises(PlanError, match=rf"^base\.model: {config.model_type}\. ") as caught:
            attempt()
        assert family.refuses in str(caught.value) and "\n" not in str(caught.value)


def test_a_layer_with_keys_and_values_of_its_own_is_refused() -> None:
    for name, head in (("zamba2", "L1H0"), ("zamba2", "L1A0"), ("bamba", "L1A2"), ("nemotron_h", "L2A1")):
        model, where = base(name), HeadId.parse(head)
        site = next(s for s in mixers(model) if s.name == where.mixer)
        graft = Graft(site, (where.head,), "add", "ssm", ("segment_end",))
        layers = [s.layer for s in family_of(model.config).sites(model.config)]
        plan = Plan("pico", geometry_of(model.config), (graft,), 0)
        with pytest.raises(PlanError, match=rf"{head}\. .*has attention already") as in_range:
            check_in_range(where, model.config)
        with pytest.raises(PlanError, match=rf"{site.name}\. .*has attention already") as spliced:
            splice_model(model, plan)
        for caught in (in_range, spliced):
            assert str(layers) in str(caught.value) and "\n" not in str(caught.value), (name, head)


def test_a_plan_for_another_model_is_refused() -> None:
    with pytest.raises(PlanError, match=r"geometry"):
        splice_model(base("mamba2"), plan_of(base("bamba")))
