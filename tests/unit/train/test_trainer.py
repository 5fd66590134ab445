"""The training loop on pico models: what trains, what a resumed run gives, what happens to a loss that is no number."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from surgery.errors import RunError, TrainingDiverged
from surgery.recipe import Optimizer, Train
from surgery.train import losses as formulas
from surgery.train import preparing as loop
from surgery.train.checkpoints import checkpoints
from surgery.train.optimizer import adamw, learning_rate_factor, mark_trainable, spliced_parameters
from surgery.train.targets import Targets
from surgery.train.trainer import OnStep
from surgery.types import Graft, MixerSpec
from tests.support.pico import HEAD_DIM, HEADS, STATE, pico_base, pico_hybrid, pico_site, pico_tokenizer
from tests.support.processes import leftover
from tests.support.stage_run import StageRun

KV = {"task": "kv_retrieval", "rows": 1, "pairs": (2, 2), "weights": {"answer": 1.0, "attention": 1.0}}
PLAIN = {"task": "sentence", "rows": 1, "weights": {"base_kl": 1.0, "lm": 0.5}}
SHAPE: dict[str, Any] = {"vocab_size": 1024, "layers": 2}
SITE = 1


def section(steps: int = 4, **more: Any) -> Train:
    optimizer = {"warmup": 1, "lr": 1e-3, "new_heads_lr": 1e-3}
    defaults = {"steps": steps, "sources": [KV, PLAIN], "save_every": 2, "optimizer": optimizer}
    return Train.model_validate({**defaults, **more})


def graft() -> Graft:
    site = MixerSpec(SITE, f"backbone.layers.{SITE}.mixer", "mamba2", HEADS, HEAD_DIM, 1, STATE)
    return Graft(site, (2,), "add", "ssm", ("segment_end",))


def hybrid() -> PreTrainedModel:
    return pico_hybrid([pico_site(SITE)], **SHAPE)


def trainer(
    folder: Path, train: Train, model: PreTrainedModel | None = None, on_step: Any = None, **more: Any
) -> StageRun:
    model = hybrid() if model is None else model
    tokenizer, accelerator = pico_tokenizer(), Accelerator(cpu=True)
    targets = Targets(**{"base": pico_base(**SHAPE), "grafts": (graft(),), **more})
    return StageRun(model, tokenizer, train, 0, folder, accelerator, targets, on_step)


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def changed(before: dict[str, Tensor], model: PreTrainedModel) -> set[str]:
    return {name for name, p in model.named_parameters() if not torch.equal(before[name], p)}


def losses(history: list[dict[str, float]]) -> list[dict[str, float]]:
    """The history without the time that each step took."""
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in history]


def test_only_new_heads_train_when_asked_for(tmp_path: Path) -> None:
    model = hybrid()
    before = weights(model)
    trainer(tmp_path, section(2, trainable="new_heads"), model).run()
    moved = changed(before, model)
    new = {n for n in before if f"layers.{SITE}.mixer.attention." in n}
    assert len(new) == len(spliced_parameters(model)) > 0
    assert moved == new
    assert {n for n, p in model.named_parameters() if p.requires_grad or p.grad is not None} == new


def test_all_weights_train_when_asked_for(tmp_path: Path) -> None:
    model = hybrid()
    before = weights(model)
    trainer(tmp_path, section(2, trainable="all"), model).run()
    assert changed(before, model) == set(before)


def test_the_base_does_not_move(tmp_path: Path) -> None:
    base = pico_base(**SHAPE)
    before = weights(base)
    trainer(tmp_path, section(2), base=base).run()
    assert changed(before, base) == set()


def test_training_on_one_batch_lowers_its_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = loop.open_source

    def always_the_first(*given: Any) -> Any:
        first = real(*given).step(0)
        return SimpleNamespace(step=lambda _: first)

    monkeypatch.setattr(loop, "open_source", always_the_first)
    history = trainer(tmp_path, section(8, sources=[KV])).run()
    assert history[-1]["loss"] < history[0]["loss"]


def test_history_tells_every_step_and_every_weighted_objective(tmp_path: Path) -> None:
    seen: list[tuple[int, dict[str, float]]] = []
    made = trainer(tmp_path, section(3), on_step=lambda step, entries: seen.append((step, entries[-1])))
    history = made.run()
    assert [entry["step"] for entry in history] == [1, 2, 3] == [step for step, _ in seen]
    for entry, (_, parts) in zip(history, seen, strict=True):
        assert entry == parts
        weighted = {k: v for k, v in parts.items() if k not in ("step", "loss", "tokens", "seconds")}
        assert set(weighted) == {"answer", "attention", "base_kl", "lm"}
        assert entry["loss"] == pytest.approx(sum(weighted.values()))
        assert entry["tokens"] == int(entry["tokens"]) > 0
    assert not made.model.training


def test_a_weight_scales_its_objective(tmp_path: Path) -> None:
    once = trainer(tmp_path / "1", section(1, sources=[PLAIN])).run()
    double = {**PLAIN, "weights": {"base_kl": 2.0, "lm": 1.0}}
    twice = trainer(tmp_path / "2", section(1, sources=[double])).run()
    assert twice[0]["lm"] == pytest.approx(2 * once[0]["lm"])
    assert twice[0]["base_kl"] == pytest.approx(2 * once[0]["base_kl"])


def test_a_control_without_grafts_is_not_supervised(tmp_path: Path) -> None:
    history = trainer(tmp_path, section(1), pico_base(**SHAPE), grafts=()).run()
    assert set(losses(history)[0]) == {"step", "loss", "answer", "base_kl", "lm", "tokens"}
    assert history[0]["base_kl"] == pytest.approx(0, abs=1e-5)


class Interrupted(Exception):
    """Stands for a killed process."""


def interrupt_at(last: int) -> OnStep:
    def on_step(step: int, _: Any) -> None:
        if step == last:
            raise Interrupted

    return on_step


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> StageRun:
    """A run of five steps, as it should be."""
    done = trainer(tmp_path_factory.mktemp("whole"), section(5))
    done.run()
    return done


@pytest.mark.parametrize("last", [1, 3, 4, 5])
def test_an_interrupted_run_ends_like_one_that_was_not(tmp_path: Path, uninterrupted: StageRun, last: int) -> None:
    with pytest.raises(Interrupted):
        trainer(tmp_path, section(5), on_step=interrupt_at(last)).run()
    seen: list[int] = []
    again = trainer(tmp_path, section(5), on_step=lambda step, _: seen.append(step))
    history = again.run()
    # A step is kept once the next one has shown its loss to be finite: 2 during step 3.
    assert seen[0] == (last - 1) // 2 * 2 + 1, "it goes on after the newest checkpoint"
    assert changed(weights(uninterrupted.model), again.model) == set()
    assert losses(history) == losses(uninterrupted.history)


def test_a_half_written_checkpoint_is_ignored(tmp_path: Path, uninterrupted: StageRun) -> None:
    with pytest.raises(Interrupted):
        trainer(tmp_path, section(5), on_step=interrupt_at(3)).run()
    leftover(tmp_path / "step_000004")
    again = trainer(tmp_path, section(5))
    again.run()
    assert changed(weights(uninterrupted.model), again.model) == set()
    assert {p.name for p in tmp_path.iterdir()} == {"step_000002", "step_000004"}


@pytest.mark.parametrize("change", ["steps", "seed", "model"])
def test_the_steps_of_another_training_are_refused(tmp_path: Path, change: str) -> None:
    with pytest.raises(Interrupted):
        trainer(tmp_path, section(5), on_step=interrupt_at(3)).run()
    model = pico_hybrid([pico_site(SITE, (1, 2))], **SHAPE) if change == "model" else hybrid()
    again = trainer(tmp_path, section(6 if change == "steps" else 5), model)
    again.seed = 1 if change == "seed" else 0
    before = weights(model)
    with pytest.raises(RunError, match="step_000002"):
        again.run()
    assert changed(before, model) == set()


def test_a_training_without_a_folder_keeps_no_steps(tmp_path: Path, uninterrupted: StageRun) -> None:
    again = trainer(tmp_path, section(5))
    again.folder = None
    again.run()
    assert list(tmp_path.iterdir()) == []
    assert changed(weights(uninterrupted.model), again.model) == set()


@pytest.mark.parametrize("broken", ["state.json", "model.safetensors", "optimizer.pt"])
@pytest.mark.parametrize("all_of_them", [False, True])
def test_after_a_broken_checkpoint_a_run_ends_like_one_that_was_not_interrupted(
    tmp_path: Path, uninterrupted: StageRun, broken: str, all_of_them: bool
) -> None:
    with pytest.raises(Interrupted):
        trainer(tmp_path, section(5), on_step=interrupt_at(5)).run()
    assert [p.name for p in checkpoints(tmp_path)] == ["step_000002", "step_000004"]
    for step in checkpoints(tmp_path)[0 if all_of_them else 1 :]:
        data = (step / broken).read_bytes()
        (step / broken).write_bytes(data[: len(data) // 2])
    seen: list[int] = []
    again = trainer(tmp_path, section(5), on_step=lambda step, _: seen.append(step))
    history = again.run()
    assert seen[0] == (1 if all_of_them else 3)
    assert changed(weights(uninterrupted.model), again.model) == set()
    assert losses(history) == losses(uninterrupted.history)


def test_two_checkpoints_remain_and_hold_all_parameters(uninterrupted: StageRun) -> None:
    assert uninterrupted.folder is not None
    assert {p.name for p in uninterrupted.folder.iterdir()} == {"step_000002", "step_000004"}
    stored = load_file(uninterrupted.folder / "step_000004" / "model.safetensors")
    assert set(stored) == set(weights(uninterrupted.model))


def test_checkpoints_come_oldest_first_and_nothing_else_counts(tmp_path: Path) -> None:
    for name in ("step_000010", "step_000002", "step_x", ".step_000001.5.tmp", "trained"):
        (tmp_path / name).mkdir()
    assert [p.name for p in checkpoints(tmp_path)] == ["step_000002", "step_000010"]
    assert checkpoints(tmp_path / "missing") == []


def spoil(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The answers' loss is not a number at the `at`-th step, although its gradient is finite."""
    calls: list[int] = []
    real = formulas.answer_loss

    def answer_loss(*given: Any) -> Tensor:
        calls.append(1)
        return real(*given) + (math.nan if len(calls) == at else 0.0)

    monkeypatch.setattr(formulas, "answer_loss", answer_loss)


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_good_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: StageRun
) -> None:
    spoil(monkeypatch, at=4)
    made = trainer(tmp_path, section(5))
    with pytest.raises(TrainingDiverged) as caught:
        made.run()
    assert caught.value.field == "train step 4"
    assert "nan" in str(caught.value.value)
    assert "step_000002" in caught.value.hint
    assert [p.name for p in checkpoints(tmp_path)] == ["step_000002"]
    assert all(p.isfinite().all() for p in made.model.parameters())
    monkeypatch.undo()
    again = trainer(tmp_path, section(5))
    again.run()
    assert changed(weights(uninterrupted.model), again.model) == set()


def test_a_loss_that_is_no_number_at_once_says_that_nothing_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, at=1)
    with pytest.raises(TrainingDiverged, match=r"step 1.*No checkpoint was saved"):
        trainer(tmp_path, section(2)).run()
    assert list(tmp_path.iterdir()) == []


def test_a_gradient_that_is_no_number_stops_too(tmp_path: Path) -> None:
    model = hybrid()
    before = weights(model)
    next(iter(spliced_parameters(model))).register_hook(lambda grad: grad * math.nan)
    with pytest.raises(TrainingDiverged, match="step 1"):
        trainer(tmp_path, section(2), model).run()
    assert changed(before, model) == set()


@pytest.mark.parametrize(("steps", "warmup"), [(10, 0), (10, 3), (300, 20), (1, 0), (5, 4)])
def test_learning_rate_rises_then_falls(steps: int, warmup: int) -> None:
    factors = [learning_rate_factor(step, steps, Optimizer(warmup=warmup)) for step in range(steps)]
    rise, fall = factors[: warmup + 1], factors[warmup:]
    assert all(0 < f <= 1 for f in factors)
    assert factors[warmup] == pytest.approx(1)
    assert rise == sorted(rise)
    assert [b - a for a, b in itertools.pairwise(rise)] == pytest.approx([1 / (warmup + 1)] * warmup)
    assert fall == sorted(fall, reverse=True)
    assert learning_rate_factor(steps, steps, Optimizer(warmup=warmup)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(("steps", "warmup"), [(25, 20), (100, 20), (100, 0), (30, 29)])
def test_a_linear_decay_begins_at_the_peak_and_never_within_the_warm_up(steps: int, warmup: int, decay: float) -> None:
    settings = Optimizer(schedule="wsd", warmup=warmup, decay=decay)
    factors = [learning_rate_factor(step, steps, settings) for step in range(steps)]
    falls = [step for step in range(1, steps) if factors[step] < factors[step - 1]]
    assert factors[warmup] == 1.0 and factors[:warmup] == sorted(factors[:warmup])
    assert falls == list(range(max(warmup, steps - max(1, round(decay * steps))) + 1, steps))
    line = max(1, min(round(decay * steps), steps - warmup))
    assert all(
        before - after <= 1 / line + 1e-9
        for before, after in zip(factors[warmup:], factors[warmup + 1 :], strict=False)
    )


def test_learning_rate_is_half_at_the_middle_of_the_fall() -> None:
    assert learning_rate_factor(60, 100, Optimizer(warmup=20)) == pytest.approx(0.5)


def test_a_warm_up_longer_than_the_training_only_rises() -> None:
    factors = [learning_rate_factor(step, 5, Optimizer(warmup=20)) for step in range(5)]
    assert factors == sorted(factors)
    assert 0 < factors[0] < factors[-1] < 1


def test_new_heads_and_the_rest_have_their_own_rates_and_vectors_do_not_decay() -> None:
    model = hybrid()
    train = section(optimizer={"lr": 1e-3, "new_heads_lr": 1e-2, "weight_decay": 0.1})
    parameters = mark_trainable(model, train)
    groups = adamw(model, parameters, train.optimizer).param_groups
    new = {id(p) for p in spliced_parameters(model)}
    assert sorted(id(p) for g in groups for p in g["params"]) == sorted(map(id, parameters))
    for group in groups:
        for p in group["params"]:
            assert group["lr"] == (1e-2 if id(p) in new else 1e-3)
            assert group["weight_decay"] == (0.1 if p.ndim > 1 else 0.0)
