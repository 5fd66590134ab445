"""Learning rates: of which parameters, at which step; and what has no weight decay."""

from __future__ import annotations

import pytest

from surgery.recipe import Lora, Optimizer, TrainStage
from surgery.recipe.optimizer import rates
from surgery.train.lora import Adapters, adapter_parameters
from surgery.train.optimizer import adamw, base_size, learning_rate_factor, mark_trainable, spliced_parameters
from tests.support.pico import pico_family, pico_hybrid, pico_site


def factors(steps: int, **settings: object) -> list[float]:
    made = Optimizer.model_validate({"floor": 0.0, **settings})
    return [learning_rate_factor(step, steps, made) for step in range(steps + 1)]


def test_the_rate_rises_in_a_line_to_its_peak_and_then_follows_the_schedule() -> None:
    for steps, warmup in ((10, 0), (10, 3), (300, 20), (1, 0), (5, 4)):
        found = factors(steps, warmup=warmup)
        assert found[:warmup] == pytest.approx([(i + 1) / (warmup + 1) for i in range(warmup)])
        assert found[warmup] == pytest.approx(1) and found[steps] == pytest.approx(0, abs=1e-12)
        assert found[warmup:] == sorted(found[warmup:], reverse=True)
    assert factors(100, warmup=20)[60] == pytest.approx(0.5), "a cosine is at half in the middle"
    assert factors(5, warmup=20)[:5] == pytest.approx([(i + 1) / 21 for i in range(5)])
    wsd = factors(100, warmup=10, schedule="wsd", decay=0.2, floor=0.1)
    assert wsd[10:81] == [1.0] * 71 and wsd[90] == pytest.approx(0.55) and wsd[100] == 0.1
    assert factors(8, warmup=2, schedule="constant") == pytest.approx([1 / 3, 2 / 3, *[1.0] * 7])


def test_new_heads_adapters_and_the_rest_have_their_own_rates() -> None:
    model, settings = pico_hybrid([pico_site(1)]), Optimizer(lr=1e-4, new_heads_lr=1e-3, lora_lr=1e-2)
    Adapters(model, Lora(rank=2))
    source = {"task": "sentence", "rows": 1, "weights": {"lm": 1.0}}
    for trainable in ("lora", "all"):
        stage = TrainStage.model_validate({"trainable": trainable, "sources": [source]})
        parameters = mark_trainable(model, stage)
        found = {id(p): g["lr"] for g in adamw(model, parameters, settings).param_groups for p in g["params"]}
        expected = dict.fromkeys(map(id, parameters), 1e-4) | dict.fromkeys(map(id, spliced_parameters(model)), 1e-3)
        assert found == expected | dict.fromkeys(map(id, adapter_parameters(model)), 1e-2)


def test_default_rates_are_those_of_the_base_without_its_new_heads() -> None:
    model = pico_hybrid([pico_site(1)])
    new = {id(p) for p in spliced_parameters(model)}
    size = sum(p.numel() for p in model.parameters() if id(p) not in new)
    assert new and base_size(model) == size
    groups = adamw(model, list(model.parameters()), Optimizer(lr_factor=0.5)).param_groups
    base, heads = rates(size)
    assert all(g["lr"] == (heads if id(p) in new else base / 2) for g in groups for p in g["params"])


def test_vectors_and_time_scales_have_no_weight_decay() -> None:
    """A_log is a matrix in Mamba-1. Decay would pull every time scale to the same value."""
    for name in ("mamba", "falcon_mamba", "mamba2"):
        model = pico_family(name)
        groups = adamw(model, list(model.parameters()), Optimizer(lr=1e-3, weight_decay=0.1)).param_groups
        decays = {id(p): g["weight_decay"] for g in groups for p in g["params"]}
        for name, parameter in model.named_parameters():
            is_free = parameter.ndim < 2 or name.endswith("A_log")
            assert decays[id(parameter)] == (0.0 if is_free else 0.1), name
