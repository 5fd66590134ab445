"""Time and memory: what does not depend on the machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from surgery.errors import RunError
from surgery.evaluate import efficiency as measuring
from surgery.evaluate.efficiency import TRANSFORMER, _Timer, costs, efficiency, transformer_like
from surgery.models.sizes import sizes_of
from surgery.recipe import Efficiency
from tests.support.pico import pico_base, pico_family, pico_hybrid, pico_site

SMALL = Efficiency(lengths=(6, 12), batch_sizes=(1, 3), new_tokens=2, repeats=2, transformer=False)


def test_every_size_is_measured_and_only_keys_and_values_grow() -> None:
    models = {"base": pico_base(layers=2).train(), "hybrid": pico_hybrid([pico_site(1, [2])], layers=2).eval()}
    measured = efficiency(models, SMALL)
    assert measured["where"].endswith(", float32, scans without kernels")
    for name, model in models.items():
        sizes, found = sizes_of(model), measured["arms"][name]
        assert [(c["rows"], c["tokens"]) for c in found] == [(1, 6), (1, 12), (3, 6), (3, 12)]
        for cost in found:
            assert cost["state_bytes"] == cost["rows"] * sizes.state_bytes
            assert cost["kv_bytes"] == cost["rows"] * sizes.kv_bytes(int(cost["tokens"]))
            tokens = cost["prefill_tokens_per_second"] * cost["time_to_first_token"]
            assert tokens == pytest.approx(cost["rows"] * cost["tokens"])
            assert min(cost["decode_tokens_per_second"], cost["peak_bytes"]) > 0
    assert [c["kv_bytes"] for c in measured["arms"]["base"]] == [0] * 4
    assert models["base"].training and not models["hybrid"].training, "left in their mode"


def test_the_peak_grows_with_the_prompt_and_leaves_weights_out() -> None:
    peaks = [costs({"m": pico_base(layers=1)}, 1, tokens, SMALL)["m"]["peak_bytes"] for tokens in (8, 64)]
    assert 4 < peaks[1] / peaks[0] < 12


def test_other_families_are_timed() -> None:
    for family in ("mamba", "zamba2"):
        cost = costs({"m": pico_family(family)}, 2, 5, SMALL.model_copy(update={"repeats": 1}))["m"]
        assert cost["state_bytes"] > 0 and cost["decode_tokens_per_second"] > 0, family


def test_the_transformer_has_the_width_and_about_the_parameters() -> None:
    base = pico_base()
    for share in (1.0, 2.0):
        wanted = round(share * sum(p.numel() for p in base.parameters()))
        model = transformer_like(base.config, wanted)
        assert model.config.hidden_size == base.config.hidden_size
        assert model.config.num_hidden_layers == base.config.num_hidden_layers
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(wanted, rel=0.1)
    cost = costs({TRANSFORMER: model}, 1, 8, SMALL)[TRANSFORMER]
    assert cost["state_bytes"] == 0
    assert cost["kv_bytes"] == 8 * 2 * 4 * model.config.num_hidden_layers * model.config.hidden_size


def test_what_is_timed_is_greedy_decoding() -> None:
    model = pico_hybrid([pico_site(1, [2])]).eval()
    whole = torch.randint(1, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    reader = _Timer(model, whole)
    with torch.no_grad():
        for _ in range(4):
            whole = torch.cat([whole, model(whole, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        first, cache = reader.prefill()
        last = reader.decode(first, cache, 3)
    assert torch.equal(torch.cat([first, last], 1), whole[:, [9, 12]])


def test_a_size_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def costs(models: Any, rows: int, tokens: int, section: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(measuring, "costs", costs)
    section = Efficiency(lengths=(16,), batch_sizes=(3,), transformer=False)
    with pytest.raises(RunError, match=r"evaluate\.efficiency: 3 prompts of 16 tokens\. Out of memory\. Remove"):
        efficiency({"base": pico_base()}, section)
