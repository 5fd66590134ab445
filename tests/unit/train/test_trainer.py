"""The steps of one stage: what trains, what a resumed run gives, what happens to a loss that is no number."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from surgery.errors import RunError, TrainingDiverged
from surgery.recipe import Train
from surgery.train import losses as formulas
from surgery.train import trainer as module
from surgery.train.checkpoints import checkpoints
from surgery.train.optimizer import spliced_parameters
from surgery.train.targets import Targets
from surgery.train.trainer import StageTrainer
from tests.support import training_worker as worker
from tests.support.pico import pico_base, pico_tokenizer
from tests.unit.train.common import SHAPE, hybrid, moved, plan, weights, without_time

KV = {"task": "kv_retrieval", "rows": 1, "pairs": (2, 2), "weights": {"answer": 1.0, "attention": 1.0}}
PLAIN = {"task": "sentence", "rows": 1, "weights": {"base_kl": 1.0, "lm": 0.5}}


def section(steps: int = 5, **more: Any) -> Train:
    optimizer = {"warmup": 1, "lr": 1e-3, "new_heads_lr": 1e-3}
    defaults = {"steps": steps, "sources": [KV, PLAIN], "save_every": 2, "optimizer": optimizer}
    return Train.model_validate({**defaults, **more})


def trainer(
    folder: Path | None, train: Train, model: PreTrainedModel | None = None, on_step: Any = None, **more: Any
) -> StageTrainer:
    targets = Targets(**{"base": pico_base(**SHAPE), "grafts": plan().grafts, **more})
    given = model or hybrid(), pico_tokenizer(), train, 0, Accelerator(cpu=True), targets
    return StageTrainer(*given, folder=folder, on_step=on_step)


def test_what_trains_is_what_moves() -> None:
    """Also in a control without a splice, whose layers are given. The base never moves."""
    for trainable, moves in (
        ("new_heads", lambda name: ".attention." in name),
        ("spliced_layers", lambda name: "layers.1." in name),
        ("all", lambda name: True),
    ):
        for model in (hybrid(), pico_base(**SHAPE)):
            is_control = not spliced_parameters(model)
            if is_control and trainable == "new_heads":
                continue
            before, base_before = weights(model), weights(pico_base(**SHAPE))
            made = trainer(None, section(1, trainable=trainable), model, **({"grafts": ()} if is_control else {}))
            made.layers = (1,)
            made.run()
            assert moved(before, model) == {name for name in before if moves(name)}, trainable
            assert moved(base_before, made.targets.base) == set()  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"train\.trainable: new_heads.*Set all"):
        trainer(None, section(2, trainable="new_heads"), pico_base(**SHAPE), grafts=()).run()


def test_history_tells_every_step_and_every_weighted_objective() -> None:
    seen: list[tuple[int, dict[str, float]]] = []
    made = trainer(None, section(3), on_step=lambda step, entries: seen.append((step, entries[-1])))
    history = made.run()
    assert [entry["step"] for entry in history] == [1, 2, 3] == [step for step, _ in seen]
    for entry, (_, parts) in zip(history, seen, strict=True):
        assert entry == parts
        weighted = {k: v for k, v in parts.items() if k not in ("step", "loss", "tokens", "seconds")}
        assert set(weighted) == {"answer", "attention", "base_kl", "lm"}
        assert entry["loss"] == pytest.approx(sum(weighted.values()))
        assert entry["tokens"] == int(entry["tokens"]) > 0
    assert not made.model.training
    double = {**PLAIN, "weights": {"base_kl": 2.0, "lm": 1.0}}
    once, twice = (trainer(None, section(1, sources=[source])).run()[0] for source in (PLAIN, double))
    assert [twice[name] for name in ("lm", "base_kl")] == pytest.approx([2 * once["lm"], 2 * once["base_kl"]])


def test_a_control_without_grafts_is_not_supervised() -> None:
    history = trainer(None, section(1), pico_base(**SHAPE), grafts=()).run()
    assert set(without_time(history)[0]) == {"step", "loss", "answer", "base_kl", "lm", "tokens"}
    assert history[0]["base_kl"] == pytest.approx(0, abs=1e-5)


def test_slow_steps_are_saved_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for most, saved in ((math.inf, []), (0, ["step_000001", "step_000002"])):
        monkeypatch.setattr(module, "MOST_SECONDS", most)
        trainer(tmp_path, section(3, save_every=50)).run()
        assert [path.name for path in checkpoints(tmp_path)] == saved


def spoil(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The answers' loss is not a number at the `at`-th step, although its gradient is finite."""
    calls: list[int] = []
    real = formulas.answer_loss

    def answer_loss(inputs: Any) -> Tensor:
        calls.append(1)
        return real(inputs) + (math.nan if len(calls) == at else 0.0)

    monkeypatch.setattr(formulas, "answer_loss", answer_loss)


def test_a_loss_that_is_no_number_stops_and_the_last_good_step_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trainer(None, section())
    expected = without_time(whole.run())
    spoil(monkeypatch, at=4)
    made = trainer(tmp_path, section())
    with pytest.raises(TrainingDiverged, match=r"train step 4: loss nan\. .*step_000002"):
        made.run()
    assert [p.name for p in checkpoints(tmp_path)] == ["step_000002"]
    assert all(p.isfinite().all() for p in made.model.parameters())
    monkeypatch.undo()
    seen: list[int] = []
    again = trainer(tmp_path, section(), on_step=lambda step, _: seen.append(step))
    assert without_time(again.run()) == expected and seen == [3, 4, 5]
    assert moved(weights(whole.model), again.model) == set()


def test_a_loss_or_gradient_that_is_no_number_at_once_changes_and_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("gradient", "loss"):
        model = hybrid()
        before = weights(model)
        if kind == "loss":
            spoil(monkeypatch, at=1)
        else:
            next(iter(spliced_parameters(model))).register_hook(lambda grad: grad * math.nan)
        with pytest.raises(TrainingDiverged, match=r"step 1.*No checkpoint was saved"):
            trainer(tmp_path, section(2), model).run()
        assert list(tmp_path.iterdir()) == [] and moved(before, model) == set(), kind


class Fsdp1(Accelerator):
    is_fsdp2 = False
    distributed_type = module.DistributedType.FSDP


class Fsdp2(Accelerator):
    is_fsdp2 = True
    distributed_type = module.DistributedType.FSDP


class DeepSpeed(Accelerator):
    distributed_type = module.DistributedType.DEEPSPEED


def test_what_the_launch_or_the_call_cannot_train_is_refused_first() -> None:
    quantized: dict[str, Any] = {"trainable": "lora", "lora": {"quantization": "nf4"}}
    cases: list[tuple[type[Accelerator], dict[str, Any], str]] = [
        (Fsdp1, {}, "fsdp_version: 2"),
        (Fsdp2, {"check_every": 2}, r"train\.check_every: 2"),
        (Fsdp2, quantized, r"train\.lora\.quantization: nf4.*ddp\.yaml"),
        (DeepSpeed, quantized, r"train\.lora\.quantization: nf4.*ddp\.yaml"),
        (Accelerator, {}, r"train\.sources \(sentence\)\.weights: base_kl.*Pass `base`"),
    ]
    for kind, more, says in cases:
        made = section(1, **more)
        with pytest.raises(RunError, match=says):
            module.check_launch(made, made, Targets(), kind(cpu=True))


def test_texts_of_the_base_are_not_made_up(tmp_path: Path) -> None:
    texts = {"base_text": 2, "max_tokens": 9, "weights": {"base_kl": 1.0}}
    made = worker.stage_run(tmp_path, worker.section(tmp_path, 1, sources=[texts]))
    with pytest.raises(RunError, match=r"train\.sources \(base_text\).*Pass `texts`"):
        made.run()
