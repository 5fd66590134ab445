"""What is said while a model trains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from surgery.recipe import Recipe, check_recipe
from surgery.run.watch import Watch
from surgery.train.optimizer import spliced_parameters
from tests.support.pico import pico_base, pico_hybrid, pico_site, pico_tokenizer

SOURCE = {"task": "kv_retrieval", "rows": 1, "weights": {"answer": 1.0}}
LOSSES: dict[str, float] = {"step": 1, "tokens": 100, "seconds": 0.5, "loss": 2.0, "answer": 1.5}


def watched(
    check_every: int | None, seen: list[str], totals: list[int] | None = None, **more: Any
) -> tuple[Watch, Any]:
    fixed = {} if "stages" in more else {"steps": 4, "sources": [SOURCE]}
    train = {**fixed, "check_every": check_every, **more}
    recipe = check_recipe({"name": "t", "base": {"model": "m"}, "train": train, "locate": {"pairs": 3}}, Recipe)

    def progress(done: int, total: int, note: str) -> None:
        seen.append(note)
        if totals is not None:
            totals.append(total)

    run = SimpleNamespace(
        recipe=recipe,
        accelerator=SimpleNamespace(is_main_process=True, device=torch.device("cpu")),
        reporter=SimpleNamespace(progress=progress),
        tokenizer=pico_tokenizer,
    )
    model = pico_base(vocab_size=len(pico_tokenizer()), layers=1).train()
    return Watch(run, model, "t", recipe.train), model  # type: ignore[arg-type]


def entries(step: int, plateaus: dict[int, int]) -> list[dict[str, float]]:
    """History until a step, with the last steps of stages by the step after which a plateau was found."""
    found = ({"last_step": plateaus[i]} if i in plateaus else {} for i in range(1, step + 1))
    return [{**LOSSES, "step": i, **more} for i, more in enumerate(found, start=1)]


def ends_of(notes: list[str]) -> list[str]:
    return [note.rsplit(", ", 1)[1] for note in notes]


@pytest.mark.parametrize(("every", "first"), [(2, 2), (3, 3), (None, 9)])
def test_held_out_accuracy_is_looked_at_every_so_often(every: int | None, first: int) -> None:
    seen: list[str] = []
    watch, model = watched(every, seen)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for step in range(1, 5):
        watch(step, [LOSSES])
    assert [", KV " in note for note in seen] == [step >= first for step in range(1, 5)]
    assert all("loss 2.000 answer 1.500" in note and "200 tokens/s" in note for note in seen)
    assert model.training and all(torch.equal(weights[name], t) for name, t in model.state_dict().items())


def test_new_heads_in_fp32_in_a_model_in_half_precision() -> None:
    """As during training, when the weights that train are fp32."""
    seen: list[str] = []
    watch, _ = watched(1, seen)
    watch.model = pico_hybrid([pico_site(0)], vocab_size=len(pico_tokenizer()), layers=1).to(torch.bfloat16)
    for parameter in spliced_parameters(watch.model):
        parameter.data = parameter.data.float()
    watch(1, [LOSSES])
    assert ", KV " in seen[0]


def test_it_is_the_share_of_prompts_that_are_answered_right(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    watch, _ = watched(1, seen)
    found = SimpleNamespace(correct=torch.arange(64) < 48)
    monkeypatch.setattr("surgery.run.watch.answer_choices", lambda *given: found)
    watch(1, [LOSSES])
    assert ", KV 0.75" in seen[0]


def test_the_total_is_the_largest_number_of_steps_until_a_plateau_is_found() -> None:
    notes: list[str] = []
    totals: list[int] = []
    watch, _ = watched(None, notes, totals, steps=40, optimizer={"schedule": "wsd", "warmup": 1}, plateau={"window": 2})
    for step in (1, 20, 21):
        watch(step, entries(step, {20: 22}))
    assert totals == [40, 22, 22]
    assert ends_of(notes) == ["no plateau yet", "plateau at step 20", "plateau at step 20"]
    assert all("last_step" not in note for note in notes)


def test_a_resumed_process_knows_the_plateau_that_an_earlier_one_found() -> None:
    notes: list[str] = []
    totals: list[int] = []
    watch, _ = watched(None, notes, totals, steps=40, optimizer={"schedule": "wsd", "warmup": 1}, plateau={"window": 2})
    watch(22, entries(22, {20: 22}))
    assert totals == [22] and ends_of(notes) == ["plateau at step 20"]


def test_the_plateau_is_that_of_the_current_stage() -> None:
    """Stages a and c, of at most 40 steps, end after 22 and 20; stage b has 10 and no plateau."""
    stage = {"steps": 40, "sources": [SOURCE], "optimizer": {"schedule": "wsd", "warmup": 1}, "plateau": {"window": 2}}
    fixed = {"name": "b", "steps": 10, "sources": [SOURCE]}
    stages = [{**stage, "name": "a"}, fixed, {**stage, "name": "c"}]
    notes: list[str] = []
    totals: list[int] = []
    watch, _ = watched(None, notes, totals, stages=stages)
    for step in (19, 22, 23, 32, 33, 51, 52):
        watch(step, entries(step, {20: 22, 51: 52}))
    assert totals == [90, 72, 72, 72, 72, 52, 52]
    first, second = "plateau at step 20", "plateau at step 51"
    fixed_note = "200 tokens/s"
    assert ends_of(notes) == ["no plateau yet", first, fixed_note, fixed_note, "no plateau yet", second, second]
