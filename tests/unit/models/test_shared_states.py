"""A decode step of variants from shared states equals the model's own step on a copy for each, and writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from surgery.data.choice_scores import arguments
from surgery.errors import ModelError
from surgery.locate.clean_run import CleanRun, run_clean
from surgery.models.cache import branched, copied_bytes
from surgery.models.lookup import mixer_of, structure_of
from surgery.models.shared_states import from_shared_states, reading
from surgery.types import MixerSpec
from tests.support.battery import base, mixers, trained
from tests.support.cases import each
from tests.support.pico import FAMILY_NAMES, pico_base, pico_family, pico_hybrid, pico_site, prompts, random_site

NEITHER = ("mamba", "falcon_mamba", "llama", "qwen2", "gpt_neox")  # a decay for every state, or no state
SHARED = [name for name in FAMILY_NAMES if reading(mixers(base(name)))]


MODELS: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: base(name) for name in SHARED},
    **{f"{name}-hybrid": lambda name=name: trained(name) for name in ("mamba2", "bamba", "llamba", "zamba2")},
    "replace": lambda: pico_hybrid([random_site(2, [0], "replace"), pico_site(0, [1, 3])]),
    "one-group": pico_base,
    "four-groups": lambda: pico_base(n_groups=4),
    "biases": lambda: pico_base(use_bias=True),
    "no-conv-bias": lambda: pico_base(use_conv_bias=False),
    "falcon_h1-norm": lambda: pico_family("falcon_h1", mamba_rms_norm=True),
    "falcon_h1-no-norm": lambda: pico_family("falcon_h1", mamba_rms_norm=False),
}
every_model = each("make", MODELS.values(), ids=MODELS.keys())
W = 3


def run_of(model: Any) -> CleanRun:
    return run_clean(model, prompts((9, 14, 12)), stepwise=True)


@torch.no_grad()
def step(run: CleanRun, is_shared: bool, unchanged: MixerSpec | None = None) -> Tensor:
    """(W*B,V) logits of a decode step whose token differs between the variants, unless a mixer is unchanged."""
    reads = reading(run.specs) if is_shared else ()
    cache = branched(run.before_query, torch.arange(len(run.batch)).repeat(W), 0, {spec.layer for spec in reads})
    ids = run.query.batch.input_ids.repeat(W, 1)
    if unchanged is None:
        ids = (ids + 7 * torch.arange(W).repeat_interleave(len(run.batch))[:, None]) % run.model.config.vocab_size
    inputs = arguments(run.model, ids, run.query.mask.repeat(W, 1), run.query.past)
    inputs["cache"] = cache
    change = from_shared_states(run.model, reads, cache, run.query.activations, unchanged) if reads else nullcontext()
    with change:
        return run.model(**inputs, use_cache=True).logits[:, -1]


def states(run: CleanRun) -> list[Tensor]:
    """All states of the SSM mixers before the query."""
    layers = [run.before_query.layers[spec.layer] for spec in run.specs if spec.is_ssm]
    return [tensor for layer in layers for tensor in (layer.conv_states[0], layer.recurrent_states[0])]


def test_all_but_mamba1_and_attention_read_their_states() -> None:
    assert set(FAMILY_NAMES) - set(SHARED) == {name for name in NEITHER if name in FAMILY_NAMES}
    for name in SHARED:
        assert reading(mixers(base(name))) == tuple(mixers(base(name), ssm=True))


@every_model
def test_a_step_is_the_models_own_and_no_state_is_copied_or_written(make: Any) -> None:
    run = run_of(make())
    before = [tensor.clone() for tensor in states(run)]
    layers = {spec.layer for spec in reading(run.specs)}
    expanded = branched(run.before_query, torch.arange(len(run.batch)).repeat(W), 0, layers)
    for layer in layers:
        own, new = run.before_query.layers[layer], expanded.layers[layer]
        assert new.conv_states[0] is own.conv_states[0] and new.recurrent_states[0] is own.recurrent_states[0]
    shared, copied = step(run, True), step(run, False)
    torch.testing.assert_close(shared, copied, atol=1e-4, rtol=1e-4)
    first, second, _ = shared.chunk(W)
    assert (first - second).abs().max() > 1e-2, "the variants differ"
    assert all(torch.equal(now, then) for now, then in zip(states(run), before, strict=True))
    saved = sum(tensor.nbytes for tensor in before)
    assert copied_bytes(run.before_query) - copied_bytes(run.before_query, layers) == saved


@every_model
def test_a_mixer_with_equal_inputs_runs_once(make: Any) -> None:
    """Up to its gated norm, where the variants separate."""
    run = run_of(make())
    spec = run.specs[0]
    mixer, structure, rows = mixer_of(run.model, spec), structure_of(spec), []
    modules = (structure.in_proj(mixer), structure.out_proj(mixer))
    handles = [m.register_forward_pre_hook(lambda _, args: rows.append(len(args[0]))) for m in modules if m is not None]
    expected = step(run, True)[: len(run.batch)]
    assert rows == [W * len(run.batch)] * 2
    rows.clear()
    again = step(run, True, unchanged=spec)
    for handle in handles:
        handle.remove()
    assert rows == [len(run.batch), W * len(run.batch)]
    torch.testing.assert_close(again, expected.repeat(W, 1), atol=1e-4, rtol=1e-4)


def test_a_mixer_that_does_not_run_is_an_error() -> None:
    """And no patch stays, after that or another error."""
    for model in (pico_base(), pico_hybrid([pico_site(1, [2])])):
        run = run_of(model)
        for error, match in ((ModelError, "never called"), (KeyError, "mine")):
            with (
                pytest.raises(error, match=match),
                from_shared_states(model, run.specs, run.before_query, run.query.activations),
            ):
                if error is KeyError:
                    raise KeyError("mine")
        assert not any({"forward", "_scan"} & set(vars(module)) for module in model.modules())
