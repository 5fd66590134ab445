"""What base and model have in common is kept once and run once, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surgery.recipe import Align, Lora, Train
from surgery.train.lora import Adapters
from surgery.train.shared_prefix import SharedPrefix, share_weights
from surgery.train.teacher import Teacher
from tests.support import training_worker as worker
from tests.support.pico import pico_base, pico_family, pico_tokenizer
from tests.unit.train.common import SHAPE, fit, hybrid, moved, weights


def after_two_steps(folder: Path, **more: Any) -> dict[str, Tensor]:
    folder.mkdir(exist_ok=True)
    made = worker.stage_run(folder, worker.section(folder, 2, **more))
    made.folder = None
    made.run()
    return weights(made.model)


def test_a_shared_prefix_changes_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes, real = list[SharedPrefix | None](), SharedPrefix.of
    for checkpointing in (False, True):
        given = {"trainable": "new_heads", "gradient_checkpointing": checkpointing}
        with monkeypatch.context() as patch:
            patch.setattr(SharedPrefix, "of", lambda *models: prefixes.append(real(*models)) or prefixes[-1])
            shared = after_two_steps(tmp_path, **given)
            assert prefixes[-1] is not None and prefixes[-1].layer == 1, "the head is in the second of two layers"
            patch.setattr(SharedPrefix, "of", lambda *_: None)
            alone = after_two_steps(tmp_path, **given)
        for name, weight in alone.items():
            torch.testing.assert_close(shared[name], weight, atol=1e-6, rtol=1e-5)


def test_the_layers_below_run_once(tmp_path: Path) -> None:
    calls: list[str] = []
    made = worker.stage_run(tmp_path, worker.section(tmp_path, 1, trainable="new_heads", sources=[worker.TEXT]))
    assert made.targets.base is not None
    for name, model in (("model", made.model), ("base", made.targets.base)):
        model.backbone.layers[0].mixer.in_proj.register_forward_hook(lambda *_, n=name: calls.append(n))
    made.run()
    assert calls == ["base"]


def test_a_base_that_was_shared_stays_as_it_is() -> None:
    """Training new heads shares the rest with the base. A later stage, or a training without it, changes the rest."""
    new_heads = {"trainable": "new_heads", "steps": 1}
    text = [{"task": "sentence", "rows": 1, "weights": {"base_kl": 1.0, "lm": 1.0}}]
    alone = [{"task": "sentence", "rows": 1, "weights": {"lm": 1.0}}]
    every, adapters = (
        {"stages": [{"name": t, "steps": 1, "trainable": t, "sources": text} for t in ("new_heads", after)]}
        for after in ("all", "lora")
    )
    for sections in (
        [(every, True)],
        [(adapters, True)],
        [({**new_heads, "sources": text}, True), ({"steps": 1, "sources": alone}, False)],
    ):
        model, base = hybrid(), pico_base(**SHAPE)
        before = weights(base)
        for given, with_base in sections:
            fit(model, Train.model_validate(given), base=base if with_base else None)
            assert moved(before, base) == set()
        name = "backbone.layers.0.mixer.in_proj.weight"
        assert not torch.equal(model.get_parameter(name), before[name])


def test_equal_frozen_weights_are_one() -> None:
    model, base = hybrid().requires_grad_(False), pico_base(**SHAPE)
    model.backbone.layers[1].mixer.attention.requires_grad_(True)
    with torch.no_grad():
        other = pico_base(**SHAPE)
        other.backbone.layers[0].norm.weight.add_(1)
    mine = dict(model.named_parameters())
    for frozen, apart in ((base, set()), (other, {"backbone.layers.0.norm.weight"})):
        share_weights(model, frozen)
        found = {name for name, p in frozen.named_parameters() if p.data_ptr() != mine[name].data_ptr()}
        assert found == apart
    assert SharedPrefix.of(model, base) is not None and SharedPrefix.of(model, other) is None
    Adapters(model, Lora(targets=("in_proj",)))
    share_weights(model, frozen := pico_base(**SHAPE))
    mine = {name.replace(".base_layer", ""): p for name, p in model.named_parameters()}
    assert all(p.data_ptr() == mine[name].data_ptr() for name, p in frozen.named_parameters())


def test_hidden_states_are_those_of_layers_that_ran(tmp_path: Path) -> None:
    """The first loss is the same, whether the layers below are frozen or not."""
    found, base = [], pico_base(**{**SHAPE, "layers": 4})
    sources = [{**worker.TEXT, "weights": {"hidden_mse": 1.0, "base_kl": 1.0}}]
    for trainable in ("all", "new_heads"):
        given = {"trainable": trainable, "sources": sources, "teacher": {"model": "x"}}
        made = worker.stage_run(tmp_path / trainable, worker.section(tmp_path, 1, **given), layers=4)
        teacher = Teacher(base, pico_tokenizer(), made.model.config, made.targets.grafts, Align(), made.section.needs)
        made.targets = replace(made.targets, teacher=teacher)
        found.append(made.run()[0]["hidden_mse"])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_families_whose_blocks_put_out_other_things() -> None:
    """A model that shares everything but its last layer gives its own logits from the middle on."""
    ids = torch.arange(2, 20).view(2, 9)
    mask = torch.ones_like(ids)
    for name in ("mamba2", "mamba", "bamba", "llamba"):
        model, base = pico_family(name).requires_grad_(False), pico_family(name).requires_grad_(False)
        share_weights(model, base)
        with torch.no_grad():
            for parameter in list(model.base_model.layers)[-1].parameters():
                parameter.data = parameter.data.clone() + 0.1
        prefix = SharedPrefix.of(model, base)
        if prefix is None:
            assert name == "bamba", "only models of several kinds of layers are left out"
            continue
        with torch.no_grad():
            expected = model(ids, attention_mask=mask, use_cache=False).logits
            base_logits = base(ids, attention_mask=mask, use_cache=False).logits
            assert torch.equal(prefix.base_logits(ids, mask), base_logits), name
            with prefix.skipped():
                assert torch.equal(model(ids, attention_mask=mask, use_cache=False).logits, expected), name
        assert not torch.equal(expected, base_logits)
