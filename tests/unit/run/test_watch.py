"""What is said while a model trains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from surgery.recipe import Recipe, check_recipe
from surgery.run.train_stages import Watch
from surgery.train.optimizer import spliced_parameters
from tests.support.pico import pico_base, pico_hybrid, pico_site, pico_tokenizer

SOURCE = {"task": "kv_retrieval", "rows": 1, "weights": {"answer": 1.0}}
LOSSES: dict[str, float] = {"step": 1, "tokens": 100, "seconds": 0.5, "loss": 2.0, "answer": 1.5}
ENDING = {"steps": 40, "sources": [SOURCE], "optimizer": {"schedule": "wsd", "warmup": 1}, "plateau": {"window": 2}}


def watched(**train: Any) -> tuple[Watch, list[tuple[int, str]]]:
    """A watch, and the total number of steps and the note of every report."""
    recipe = check_recipe({"name": "t", "base": {"model": "m"}, "train": train, "locate": {"pairs": 3}}, Recipe)
    seen: list[tuple[int, str]] = []
    run: Any = SimpleNamespace(
        recipe=recipe,
        accelerator=SimpleNamespace(is_main_process=True, device=torch.device("cpu")),
        reporter=SimpleNamespace(progress=lambda done, total, note: seen.append((total, note))),
        tokenizer=pico_tokenizer,
    )
    model = pico_base(vocab_size=len(pico_tokenizer()), layers=1).train()
    return Watch(run, model, recipe.train), seen


def entries(step: int, plateaus: dict[int, int]) -> list[dict[str, float]]:
    """History until a step, with the last steps of stages by the step after which a plateau was found."""
    found = ({"last_step": plateaus[i]} if i in plateaus else {} for i in range(1, step + 1))
    return [{**LOSSES, "step": i, **more} for i, more in enumerate(found, start=1)]


def test_held_out_accuracy_is_measured_every_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the share of prompts that are answered right. The model stays as it is."""
    for every, first in ((2, 2), (3, 3), (None, 9)):
        watch, seen = watched(check_every=every, steps=4, sources=[SOURCE])
        weights = {name: tensor.clone() for name, tensor in watch.model.state_dict().items()}
        for step in range(1, 5):
            watch(step, [LOSSES])
        assert [", KV " in note for _, note in seen] == [step >= first for step in range(1, 5)]
        assert all("loss 2.000 answer 1.500" in note and "200 tokens/s" in note for _, note in seen)
        assert watch.model.training
        assert all(torch.equal(weights[name], tensor) for name, tensor in watch.model.state_dict().items())
    found = SimpleNamespace(correct=torch.arange(64) < 48)
    monkeypatch.setattr("surgery.run.train_stages.answer_choices", lambda *given: found)
    watch, seen = watched(check_every=1, steps=4, sources=[SOURCE])
    watch(1, [LOSSES])
    assert ", KV 0.75" in seen[0][1]


def test_new_heads_in_fp32_in_a_model_in_half_precision() -> None:
    """As during training, when the weights that train are fp32."""
    watch, seen = watched(check_every=1, steps=4, sources=[SOURCE])
    model = pico_hybrid([pico_site(0)], vocab_size=len(pico_tokenizer()), layers=1).to(torch.bfloat16)
    watch = Watch(watch.run, model, watch.section)
    for parameter in spliced_parameters(model):
        parameter.data = parameter.data.float()
    watch(1, [LOSSES])
    assert ", KV " in seen[0][1]


def test_the_total_is_the_largest_number_of_steps_until_a_plateau_is_found() -> None:
    """Stages a and c, of at most 40 steps, end after 22 and 20; stage b has 10 and no plateau."""
    none, first, second = "no plateau yet", "plateau at step 20", "plateau at step 51"
    fixed = {"name": "b", "steps": 10, "sources": [SOURCE]}
    staged = {"stages": [{**ENDING, "name": "a"}, fixed, {**ENDING, "name": "c"}]}
    both, speed = {20: 22, 51: 52}, "200 tokens/s"
    for train, found, expected in (
        (ENDING, {20: 22}, {1: (40, none), 20: (22, first), 21: (22, first)}),
        (ENDING, {20: 22}, {22: (22, first)}),  # an earlier process found it
        (staged, both, {19: (40, none), 22: (22, first), 23: (10, speed), 32: (10, speed), 33: (40, none)}),
        (staged, both, {51: (20, second), 52: (20, second)}),
    ):
        watch, seen = watched(check_every=None, **train)
        for step in expected:
            watch(step, entries(step, found))
        assert [(total, note.rsplit(", ", 1)[1]) for total, note in seen] == list(expected.values())
        names = ("a: ", "b: ", "c: ") if train is staged else ("loss",)
        assert all("last_step" not in note and note.startswith(names) for _, note in seen)
