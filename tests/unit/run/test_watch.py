"""What is said while a model trains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from surgery.recipe import Recipe, check_recipe
from surgery.run.watch import Watch
from surgery.testing.pico import pico_base, pico_tokenizer

LOSSES = {"step": 1, "tokens": 100, "seconds": 0.5, "loss": 2.0, "answer": 1.5}


def watched(
    check_every: int | None, seen: list[str], totals: list[int] | None = None, **more: Any
) -> tuple[Watch, Any]:
    source = {"task": "kv_retrieval", "rows": 1, "weights": {"answer": 1.0}}
    train = {"steps": 4, "sources": [source], "check_every": check_every, **more}
    recipe = check_recipe({"name": "t", "base": {"model": "m"}, "train": train, "locate": {"pairs": 3}}, Recipe)

    def progress(done: int, total: int, note: str) -> None:
        seen.append(note)
        if totals is not None:
            totals.append(total)

    run = SimpleNamespace(
        recipe=recipe,
        accelerator=SimpleNamespace(is_main_process=True),
        reporter=SimpleNamespace(progress=progress),
        tokenizer=pico_tokenizer,
    )
    model = pico_base(vocab_size=len(pico_tokenizer()), layers=1).train()
    return Watch(run, model, "t", recipe.train), model  # type: ignore[arg-type]


@pytest.mark.parametrize(("every", "first"), [(2, 2), (3, 3), (None, 9)])
def test_held_out_accuracy_is_looked_at_every_so_often(every: int | None, first: int) -> None:
    seen: list[str] = []
    watch, model = watched(every, seen)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for step in range(1, 5):
        watch(step, LOSSES)
    assert [", KV " in note for note in seen] == [step >= first for step in range(1, 5)]
    assert all("loss 2.000 answer 1.500" in note and "200 tokens/s" in note for note in seen)
    assert model.training and all(torch.equal(weights[name], t) for name, t in model.state_dict().items())


def test_it_is_the_share_of_prompts_that_are_answered_right(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    watch, _ = watched(1, seen)
    found = SimpleNamespace(correct=torch.arange(64) < 48)
    monkeypatch.setattr("surgery.run.watch.answer_choices", lambda *given: found)
    watch(1, LOSSES)
    assert ", KV 0.75" in seen[0]


def test_the_total_is_the_largest_number_of_steps_until_a_plateau_is_found() -> None:
    notes: list[str] = []
    totals: list[int] = []
    watch, _ = watched(None, notes, totals, steps=40, optimizer={"schedule": "wsd"}, plateau={"window": 2})
    watch(1, LOSSES)
    watch(20, {**LOSSES, "step": 20, "last_step": 22})
    watch(21, {**LOSSES, "step": 21})
    assert totals == [40, 22, 22]
    assert [note.rsplit(", ", 1)[1] for note in notes] == ["no plateau yet", "plateau at step 20", "plateau at step 20"]
    assert all("last_step" not in note for note in notes)
