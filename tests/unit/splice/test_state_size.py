"""The cut of the state: which channels contribute, which weights stay, and what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from surgery.data.encoding import encode
from surgery.errors import PlanError, ProbeError
from surgery.hybrid.modeling_hybrid import SplicedAttention
from surgery.models.hooks import hooked, record
from surgery.models.lookup import family_of, geometry_of, mixer_of, structure_of
from surgery.models.spliced import plan_of_hybrid
from surgery.probes.kv_retrieval import kv_prompts
from surgery.recipe import Splice
from surgery.splice.graft import cut_model, splice_model
from surgery.splice.plan import make_plan
from surgery.splice.state_size import StateCut, choose_channels, cut_from_json, cut_to_json, state_contributions
from surgery.types import MixerSpec
from tests.support.battery import assert_cache_is_as_large_as_said, base, logits, mixers, plan_of
from tests.support.cases import each
from tests.support.pico import SPLICED_FAMILIES, pico_family, pico_family_config, pico_tokenizer, prompts, tokens
from tests.unit.splice.test_plan import chosen

CUT = [name for name in SPLICED_FAMILIES if family_of(pico_family_config(name)).state_field]
every_cut = each("name", CUT)


def some_cut(model: Any, size: int = 3, seed: int = 0) -> StateCut:
    """Random channels, others for each mixer and group."""
    rng = torch.Generator().manual_seed(seed)
    return choose_channels(
        {s.name: torch.rand(s.num_groups, s.state_size, generator=rng) for s in mixers(model, ssm=True)}, size
    )


@torch.no_grad()
def silence_channels(model: Any, spec: MixerSpec, group: int, channels: Any) -> None:
    """Make C of these channels exactly zero. Each activation of the convolution maps 0 to 0."""
    head = structure_of(spec).weight_slices(spec, group * spec.num_heads // spec.num_groups)
    mixer = mixer_of(model, spec)
    for module, rows in ((structure_of(spec).in_proj(mixer), head.query), (mixer.conv1d, head.conv_query)):
        for weight in module.parameters(recurse=False):
            weight[rows][list(channels)] = 0


def with_silent_channels(model: Any, cut: StateCut) -> Any:
    model = copy.deepcopy(model)
    for spec in mixers(model, ssm=True):
        for group, kept in enumerate(cut.kept[spec.name]):
            silence_channels(model, spec, group, set(range(spec.state_size)) - set(kept))
    return model


class TestCut:
    @every_cut
    def test_equals_the_base_without_the_terms_of_the_other_channels(self, name: str) -> None:
        model, cut, batch = base(name), some_cut(base(name)), prompts()
        smaller = cut_model(model, cut)
        assert {s.state_size for s in mixers(smaller, ssm=True)} == {3} and type(smaller) is type(model)
        for ids, mask in ((tokens(), None), (batch.input_ids, batch.attention_mask)):
            expected = logits(with_silent_channels(model, cut), ids, mask)
            real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
            torch.testing.assert_close(logits(smaller, ids, mask)[real], expected[real], atol=2e-5, rtol=1e-4)
            assert not torch.allclose(logits(model, ids, mask)[real], expected[real], atol=1e-2)
        assert_cache_is_as_large_as_said(smaller)

    @every_cut
    @each("mode", ["add", "replace"])
    def test_of_a_hybrid_leaves_its_branches_as_wide_as_the_base(self, name: str, mode: Any) -> None:
        model, cut, plan = base(name), some_cut(base(name)), plan_of(base(name), mode)
        before = logits(model, tokens())
        hybrid = splice_model(model, plan, Splice(mode=mode, min_width=None, state_size=3), cut=cut)
        assert {s.state_size for s in mixers(hybrid, ssm=True)} == {3}
        whole = splice_model(model, plan, Splice(mode=mode, min_width=None))
        branches = [[m for m in h.modules() if isinstance(m, SplicedAttention)] for h in (hybrid, whole)]
        for ours, theirs in zip(*branches, strict=True):
            assert ours.qk_width == 8
            assert all(torch.equal(x, y) for x, y in zip(ours.parameters(), theirs.parameters(), strict=True))
        expected = logits(with_silent_channels(whole, cut), tokens())
        torch.testing.assert_close(logits(hybrid, tokens()), expected, atol=2e-5, rtol=1e-4)
        assert_cache_is_as_large_as_said(hybrid)
        assert torch.equal(logits(model, tokens()), before), "the base is unchanged"

    @every_cut
    def test_config_has_both_widths_so_that_the_plan_is_the_base_s(self, name: str) -> None:
        model, plan = base(name), plan_of(base(name))
        config = splice_model(model, plan, Splice(state_size=3), cut=some_cut(model)).config
        again = type(config)(**config.to_dict())
        assert {s.state_size for s in family_of(again).mixers(again) if s.is_ssm} == {3}
        recovered = plan_of_hybrid(again, plan.base)
        assert recovered.grafts == plan.grafts and recovered.geometry == plan.geometry == geometry_of(model.config)


class TestContributions:
    @each("name", ["mamba2", "llamba", "zamba2"])
    def test_are_the_change_of_the_log_odds_when_a_term_is_removed(self, name: str) -> None:
        """Terms come from the model itself, as the scan minus the scan without the channel; the change is numeric."""
        model = pico_family(name, vocab_size=1024).double().requires_grad_(False)
        tokenizer, documents = pico_tokenizer(), kv_prompts("test", 0, 3, 2) + kv_prompts("test", 0, 1, 3)
        found = state_contributions(model, tokenizer, documents, batch_size=3)
        batch = encode(documents, tokenizer, padding_side="left")
        specs = mixers(model, ssm=True)
        assert [found[s.name].shape for s in specs] == [(s.num_groups, s.state_size) for s in specs]
        for spec in (specs[0], specs[-1]):
            for group, channel in {(0, 1), (spec.num_groups - 1, 6)}:
                term = scan_of(model, spec, batch)
                changed = copy.deepcopy(model)
                silence_channels(changed, spec, group, [channel])
                term = term - scan_of(changed, spec, batch)
                step = 0.02  # scans are computed in fp32, whatever the dtype of the weights
                ends = [shifted(model, spec, batch, sign * step * term).double() for sign in (1, -1)]
                expected = ((ends[0] - ends[1]) / step / 2).square().mean().sqrt()
                torch.testing.assert_close(found[spec.name][group, channel], expected, rtol=5e-3, atol=1e-4)
                assert expected > 0.005

    def test_do_not_depend_on_batches_and_leave_no_trace(self) -> None:
        model, tokenizer, documents = pico_family("mamba2", vocab_size=1024), pico_tokenizer(), kv_prompts("t", 0, 5, 3)
        parts = [state_contributions(model, tokenizer, documents, size) for size in (5, 2)]
        for name, whole in parts[0].items():
            assert whole.dtype == torch.float64 and bool((whole > 0).all())
            torch.testing.assert_close(parts[1][name], whole, rtol=1e-4, atol=1e-7)
        assert all(p.grad is None and p.requires_grad for p in model.parameters())
        with pytest.raises(ProbeError, match="documents"):
            state_contributions(model, tokenizer, [], 2)


def scan_of(model: Any, spec: MixerSpec, batch: Any) -> Tensor:
    with record(model, [spec]) as activations:
        logits(model, batch.input_ids, batch.attention_mask)
    return activations.scan[spec.name]


def shifted(model: Any, spec: MixerSpec, batch: Any, by: Tensor) -> Tensor:
    """(B,) log-odds of each answer if `by` is subtracted from the scan. The answers have one token."""
    with hooked(model, [spec]) as hooks:
        reader = structure_of(spec).scan_reader(mixer_of(model, spec))
        hooks.before(spec.layer, "scan", reader, lambda args: (args[0] - by, *args[1:]))
        found = logits(model, batch.input_ids, batch.attention_mask)
    assert batch.answers.sum(1).tolist() == [1] * len(batch)
    at = batch.answers.nonzero()
    p = found[at[:, 0], at[:, 1] - 1].softmax(-1)[range(len(at)), batch.input_ids[batch.answers]]
    return torch.log(p / (1 - p))


def test_the_largest_contributions_are_kept_in_order() -> None:
    values = {"L0H": torch.tensor([[0.1, 3.0, 2.0, 0.5], [1.0, 1.0, 1.0, 1.0]])}
    cut = choose_channels(values, 2)
    assert cut == StateCut(2, {"L0H": ((1, 2), (0, 1))})
    assert cut_from_json(cut_to_json(cut, values)) == cut
    for broken in ({"kept": [[0]]}, {"kept": {"L0H": [["x"]]}}, {"kept": {"L0H": [[-1, 0]]}}, {}):
        with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
            cut_from_json({"state_size": 2, **broken})


class TestRefused:
    @each(
        ("name", "size", "words"),
        [
            ("mamba2", 8, "8. The model's state has 8 channels. Set a smaller number"),
            ("llamba", 9, "9. The model's state has 8 channels"),
            ("mamba", 2, "2. The state of mamba models cannot be cut, but that of .*mamba2.* models can"),
            ("falcon_mamba", 2, "cannot be cut"),
        ],
    )
    def test_sizes_that_the_model_cannot_have(self, name: str, size: int, words: str) -> None:
        config = pico_family_config(name)
        with pytest.raises(PlanError, match=f"splice.state_size: {words}" if size > 2 else words):
            make_plan(chosen("L0H1", config=config), config, Splice(state_size=size))

    def test_a_splice_without_its_channels(self) -> None:
        model, plan = base("mamba2"), plan_of(base("mamba2"))
        for section, cut in (
            (Splice(state_size=3), None),
            (Splice(state_size=2), some_cut(model)),
            (None, some_cut(model)),
        ):
            with pytest.raises(PlanError, match=r"splice\.state_size"):
                splice_model(model, plan, section, cut=cut)

    @each("kept", [{}, ((0, 1, 2),), ((0, 1), (0, 1)), ((0, 1, 1), (0, 1, 2)), ((0, 1, 8), (0, 1, 2))])
    def test_channels_of_another_model(self, kept: Any) -> None:
        model = base("mamba2")
        cut = some_cut(model)
        with pytest.raises(PlanError, match=r"state\.json kept: L0H"):
            cut_model(model, replace(cut, kept={**cut.kept, "L0H": kept}))

    @each("size", [0, -1, "x"])
    def test_a_config_with_another_width_before_the_cut(self, size: Any) -> None:
        model = base("mamba2")
        config = copy.deepcopy(splice_model(model, plan_of(model), Splice(state_size=3), cut=some_cut(model)).config)
        config.base_state_size = size
        with pytest.raises(PlanError, match=r"config\.json base_state_size"):
            plan_of_hybrid(config, "pico")
