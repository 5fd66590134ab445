"""What `train_model` does with a recipe's section: stages, plateaus, LoRA, a teacher, precision, trackers, trouble."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import PeftModel
from torch._inductor.exc import InductorError
from transformers import PreTrainedModel

from surgery.errors import RecipeError, RunError, TrainingDiverged
from surgery.recipe import Train
from surgery.train import tracking as track
from surgery.train.checkpoints import checkpoints, fault_of
from surgery.train.optimizer import spliced_parameters
from surgery.train.plateau import stage_lengths
from surgery.train.step_loader import workers_by_default
from surgery.train.teacher import Teacher
from surgery.train.training import make_accelerator
from tests.support.pico import pico_base, pico_family, pico_tokenizer
from tests.unit.train.common import FAST, KV, SHAPE, fit, fit_until, hybrid, moved, plan, weights, without_time

FROZEN = {"warmup": 0, "lr": 1e-12, "new_heads_lr": 1e-12}


def section(**given: Any) -> Train:
    return Train.model_validate({"optimizer": FAST, "sources": [KV], **given} if "stages" not in given else given)


def stage(name: str, **given: Any) -> dict[str, Any]:
    return {"name": name, "steps": 2, "sources": [KV], "optimizer": FAST, **given}


def test_the_section_may_be_plain_data_and_is_checked_like_a_recipe() -> None:
    data = {"steps": 1, "sources": [KV], "optimizer": FAST}
    models = hybrid(), hybrid()
    histories = [fit(model, given) for model, given in zip(models, (data, section(steps=1)), strict=True)]
    assert without_time(histories[0]) == without_time(histories[1])
    with pytest.raises(RecipeError, match=r"^stepz: 1\. Unknown key\. Did you mean steps"):
        fit(models[0], {"stepz": 1})


class TestStages:
    SECTION = section(
        stages=[stage("align", trainable="new_heads"), stage("distil", steps=3), stage("last", steps=1)], save_every=1
    )

    def test_they_follow_each_other_and_steps_are_counted_through(self) -> None:
        model, seen = hybrid(), []
        before = weights(model)

        def on_step(step: int, _: Any) -> None:
            seen.append(step)
            if step == 2:
                assert moved(before, model) == {n for n in before if ".attention." in n}

        history = fit(model, self.SECTION, on_step=on_step)
        assert seen == [1, 2, 3, 4, 5, 6] == [h["step"] for h in history]
        assert moved(before, model) == set(before)
        control = fit(pico_base(**SHAPE), self.SECTION, control=True)  # without what trains new heads
        assert [h["step"] for h in control] == [3, 4, 5, 6]
        first, second = fit(hybrid(), section(stages=[stage(n, steps=1, optimizer=FROZEN) for n in ("a", "b")]))
        assert first["answer"] != pytest.approx(second["answer"], abs=1e-6), "each has documents of its own"

    def test_a_stopped_run_goes_on_in_its_stage(self, tmp_path: Path) -> None:
        whole = hybrid()
        expected = without_time(fit(whole, self.SECTION))
        for last in (1, 2, 3, 5):
            fit_until(last, hybrid(), self.SECTION, folder=tmp_path / str(last))
            again, seen = hybrid(), list[int]()
            record = lambda step, _, seen=seen: seen.append(step)  # noqa: E731
            assert without_time(fit(again, self.SECTION, folder=tmp_path / str(last), on_step=record)) == expected
            assert moved(weights(whole), again) == set()
            # A step is kept once the next one has begun; a stage's last one when the next stage begins.
            assert seen[0] == last

    def test_a_run_stopped_behind_a_wider_stage_keeps_its_base(self, tmp_path: Path) -> None:
        """Weights that the later stage freezes are no longer those of the base, which `base_kl` compares with."""
        text = {"task": "sentence", "rows": 1, "weights": {"base_kl": 1.0}}
        of_each: dict[str, Any] = {"sources": [KV, text], "lora": {"rank": 2}}
        for first, later, dtype in (
            ("all", "new_heads", torch.float32),
            ("lora", "spliced_layers", torch.bfloat16),
            ("spliced_layers", "lora", torch.float32),
        ):
            one = stage("one", trainable=first, **{**of_each, "steps": 1})
            every = section(stages=[one, stage("two", trainable=later, **of_each)], save_every=1)
            models = [hybrid().to(dtype) for _ in range(3)]
            bases = [pico_base(**SHAPE).to(dtype) for _ in range(3)]
            as_loaded = weights(bases[0])
            expected = without_time(fit(models[0], every, base=bases[0]))
            fit_until(3, models[1], every, base=bases[1], folder=tmp_path / first)
            assert without_time(fit(models[2], every, base=bases[2], folder=tmp_path / first)) == expected, first
            assert moved(weights(models[0]), models[2]) == set(), first
            assert moved(as_loaded, bases[0]) == moved(as_loaded, bases[2]) == set(), first

    def test_later_stages_may_change_but_no_earlier_one_and_no_splice(self, tmp_path: Path) -> None:
        fit(hybrid(), self.SECTION.model_copy(update={"stages": self.SECTION.stages[:2]}), folder=tmp_path)
        grown, whole, seen = hybrid(), hybrid(), list[int]()
        history = fit(grown, self.SECTION, folder=tmp_path, on_step=lambda step, _: seen.append(step))
        fit(whole, self.SECTION)
        assert seen[-1] == 6 and len(seen) < 6 and [h["step"] for h in history] == [1, 2, 3, 4, 5, 6]
        assert moved(weights(whole), grown) == set()
        other = section(stages=[stage("align"), *(s.model_dump() for s in self.SECTION.stages[1:])], save_every=1)
        with pytest.raises(RunError, match="It belongs to another training"):
            fit(hybrid(), other, folder=tmp_path)
        with pytest.raises(RunError, match="It belongs to another training"):  # whose weights have the same shapes
            fit(hybrid(), self.SECTION, plan(head=3), folder=tmp_path)


def test_what_cannot_be_is_refused() -> None:
    for given, says in (
        ({"stages": [stage("a")], "steps": 3}, "set steps in each stage"),
        ({"stages": [stage("a"), stage("a")]}, "same name"),
        ({"sources": [{**KV, "weights": {"distil": 1.0}}]}, "needs a teacher"),
        ({"sources": [KV], "teacher": {"model": "x"}}, "no objective uses"),
        ({"sources": [KV], "tokens": 1000}, "needs `tokens` in every source"),
        ({"sources": [KV], "distil": {"cache": True}}, "needs `top_k`"),
    ):
        with pytest.raises(ValueError, match=says):
            Train.model_validate(given)


class TestPlateau:
    """A loss that does not fall from one step to the next is at a plateau, after 4 steps or more."""

    ENDS: ClassVar[dict[str, Any]] = {
        "steps": 20,
        "optimizer": {**FAST, "schedule": "wsd", "decay": 0.3},
        "plateau": {"window": 1, "patience": 1, "threshold": 0.0, "min_steps": 4},
    }

    def test_the_weights_are_those_of_a_stage_of_this_length(self) -> None:
        model, again, made = hybrid(), hybrid(), section(**self.ENDS)
        history = fit(model, made)
        (entry,) = (h for h in history if "last_step" in h)
        assert 4 <= entry["step"] < entry["last_step"] == len(history) == history[-1]["step"] < 20
        assert len(history) == round(entry["step"] / 0.7)
        fit(again, made.with_steps([len(history)]))
        assert moved(weights(model), again) == set()

    def test_a_stopped_run_ends_with_the_same_step_and_weights(self, tmp_path: Path) -> None:
        """The next stages begin where it ends. The callback has the steps of the stopped run too."""
        every = section(stages=[stage("ends", **self.ENDS), stage("fixed")], save_every=1)
        whole, seen = hybrid(), list[list[dict[str, float]]]()
        expected = without_time(fit(whole, every))
        found, lengths = next(int(h["step"]) for h in expected if "last_step" in h), stage_lengths(expected, every)
        assert [h["step"] for h in expected] == list(range(1, sum(lengths) + 1))
        assert lengths[0] < 20 and lengths[1] == 2
        for last in (found, lengths[0] + 1):
            seen.clear()
            fit_until(last, hybrid(), every, folder=tmp_path / str(last))
            again, record = hybrid(), lambda _, entries: seen.append(list(entries))
            assert without_time(fit(again, every, folder=tmp_path / str(last), on_step=record)) == expected
            assert moved(weights(whole), again) == set()
            assert without_time(seen[0]) == expected[:last]


class TestLora:
    @pytest.mark.parametrize("first", ["new_heads", "lora", "all"])
    def test_adapters_are_those_that_fit_to_the_spliced_model(self, first: str, tmp_path: Path) -> None:
        """After a stage that changed the base's weights, they would not: PEFT would load another model."""
        model, fresh = hybrid(), hybrid()
        of_lora = {"trainable": "lora", "lora": {"rank": 2}}
        stages = [stage("first", trainable=first, lora={"rank": 2}), stage("second", **of_lora)]
        fit(model, section(stages=stages), outputs=tmp_path)
        saved = {str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("adapter_config.json")}
        assert saved == {"new_heads": {"adapters"}, "lora": {"adapters/first"}, "all": set()}[first]
        if first == "new_heads":
            ids = torch.arange(2, 14)[None]
            loaded = PeftModel.from_pretrained(fresh, str(tmp_path / "adapters"))
            with torch.no_grad():
                torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("half", "precision"), [(torch.bfloat16, "fp32"), (torch.float16, "bf16")])
def test_a_base_in_half_precision_trains_fp32_weights_and_gives_the_dtypes_back(
    half: torch.dtype, precision: str
) -> None:
    model, seen = hybrid().to(half), []
    own = {id(p) for p in spliced_parameters(model)}

    def on_step(*_: Any) -> None:
        seen.append({p.dtype for p in model.parameters() if id(p) in own})
        seen.append({p.dtype for p in model.parameters() if id(p) not in own})

    history = fit(model, section(steps=1, trainable="new_heads", precision=precision), on_step=on_step)
    assert seen == [{torch.float32}, {half}] and history[0]["loss"] > 0
    assert {p.dtype for p in model.parameters()} == {half}


class TestTeacher:
    @pytest.fixture(scope="class")
    def teacher(self, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("teacher")
        pico_family("llama", vocab_size=1024, hidden_size=32).save_pretrained(folder)
        pico_tokenizer().save_pretrained(folder)
        return {"model": str(folder)}

    CACHED: ClassVar[dict[str, Any]] = {
        "steps": 1,
        "sources": [{**KV, "weights": {"distil": 1.0}}],
        "distil": {"top_k": 8, "cache": True},
    }

    def test_every_objective_lowers_its_distance(self, teacher: dict[str, Any]) -> None:
        names = ("attention_mse", "hidden_mse", "distil", "attention_kl")
        more = {"steps": 8, "align": {"heads": {"L1H2": "L0H1"}}}
        stages = [stage(name, sources=[{**KV, "weights": {name: 1.0}}], **more) for name in names]
        history = fit(hybrid(), section(stages=stages, teacher=teacher))
        for begin, name in zip((0, 8, 16, 24), names, strict=True):
            part = [h[name] for h in history[begin : begin + 8]]
            assert sum(part[-3:]) < sum(part[:3]) and min(part) > 0, name

    def test_a_cache_gives_the_same_run_without_the_teacher(
        self, teacher: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given, asked = section(**{**self.CACHED, "steps": 2}, teacher=teacher), list[Any]()
        first, second, real = hybrid(), hybrid(), Teacher.outputs
        one = fit(first, given, outputs=tmp_path)
        monkeypatch.setattr(Teacher, "outputs", lambda self, batch, want: asked.append(want) or real(self, batch, want))
        assert without_time(fit(second, given, outputs=tmp_path)) == without_time(one)
        assert moved(weights(first), second) == set() and not any(asked)

    def test_another_precision_or_vocabulary_has_a_cache_of_its_own(
        self, teacher: dict[str, Any], tmp_path: Path
    ) -> None:
        for more in ({}, {"precision": "bf16"}, {"teacher": {**teacher, "dtype": "bfloat16"}}):
            fit(hybrid(), section(**{**self.CACHED, "teacher": teacher, **more}), outputs=tmp_path)
        control = pico_base(vocab_size=len(pico_tokenizer()), layers=2)
        fit(control, section(**self.CACHED, teacher=teacher), outputs=tmp_path, control=True)
        assert len(list((tmp_path / "teacher_logits").iterdir())) == 4


def test_weights_change_over_a_stage() -> None:
    ramp, full = ({**KV, "weights": {"answer": w}} for w in ([1.0, 0.0], 1.0))
    down, flat = (fit(hybrid(), section(steps=3, sources=[s], optimizer=FROZEN)) for s in (ramp, full))
    shares = [a["answer"] / b["answer"] for a, b in zip(down, flat, strict=True)]
    assert shares == pytest.approx([1.0, 0.5, 0.0], abs=1e-5)


def test_trackers_get_the_losses_of_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    history = fit(hybrid(), section(steps=3, trackers=["tensorboard"]), outputs=tmp_path)
    events = EventAccumulator(str(tmp_path / "logs" / "hybrid" / "surgery"))
    events.Reload()
    assert [e.value for e in events.Scalars("train/answer")] == pytest.approx([h["answer"] for h in history])
    assert [e.step for e in events.Scalars("train/answer")] == [1, 2, 3]
    monkeypatch.setattr(track, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match="pip install wandb"):
        fit(hybrid(), section(steps=1, trackers=["wandb"]), outputs=tmp_path / "none")
    assert not (tmp_path / "none").exists()


class TestTrouble:
    def test_a_learning_rate_that_breaks_the_model_stops_the_run(self, tmp_path: Path) -> None:
        """Also where it is the last step that does, and no loss follows."""
        wild = {"warmup": 0, "lr": 1.0, "new_heads_lr": 1.0}
        for steps in (4, 8):
            with pytest.raises(TrainingDiverged, match=r"train step 4: .*No checkpoint was saved yet") as caught:
                fit(hybrid(), section(steps=steps, optimizer=wild), folder=tmp_path)
            assert math.isfinite(float(str(caught.value.value).split()[1]))
            assert list(tmp_path.iterdir()) == []

    def test_a_compiler_that_fails_names_the_key_and_leaves_whole_steps(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In the first step, or where a later one has other shapes. A fault of the model is not the compiler's."""
        compiler = InductorError(RuntimeError("No working C++ compiler found"), None)
        says = r"train\.compile: true \(.*No working C\+\+ compiler.*set train\.compile to false"
        for at, saved, error, match in (
            (1, 0, compiler, says),
            (3, 1, compiler, says),
            (1, 0, RuntimeError("shapes"), "^shapes$"),
        ):
            model, folder = hybrid(), tmp_path / f"{at}{match[:4]}"
            fail_compiled(model, error, at, monkeypatch)
            with pytest.raises((RunError, RuntimeError), match=match):
                fit(model, section(steps=3, save_every=1, compile=True), folder=folder)
            assert [fault_of(step) for step in checkpoints(folder)] == [None] * saved


def fail_compiled(model: PreTrainedModel, error: Exception, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling replaces the forward pass by one that raises the error at its `at`-th call."""
    real, calls = model.forward, list[int]()

    def forward(*given: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise error
        return real(*given, **named)

    monkeypatch.setattr(model, "compile", lambda: monkeypatch.setattr(model, "forward", forward))


def test_the_precision_is_the_recipe_s_and_not_the_launcher_s(monkeypatch: pytest.MonkeyPatch) -> None:
    AcceleratorState._reset_state()
    try:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        assert make_accelerator().mixed_precision == "no"
        AcceleratorState._reset_state()
        own = Accelerator(cpu=True)
        assert own.mixed_precision == "bf16"
        with pytest.raises(RunError, match=r"mixed_precision.*train\.precision"):
            make_accelerator()
        with pytest.raises(RunError, match=r"mixed_precision is bf16\. .*train\.precision"):
            fit(hybrid(), section(steps=1), accelerator=own)
    finally:
        AcceleratorState._reset_state()


def test_no_workers_by_default_on_a_cpu() -> None:
    assert workers_by_default("cpu") == 0
    assert 0 <= workers_by_default("cuda", 1) <= 8
    assert workers_by_default("cuda", 10**6) == 0
