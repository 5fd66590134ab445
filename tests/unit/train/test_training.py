"""Several stages, a teacher, LoRA, schedules, precision: what `train` does with a recipe's section."""

from __future__ import annotations

import errno
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import PeftModel
from torch import Tensor
from torch._inductor.exc import InductorError
from transformers import PreTrainedModel

from surgery.errors import RecipeError, RunError, TrainingDiverged
from surgery.models.lookup import family_of, geometry_of
from surgery.recipe import Optimizer, Train
from surgery.train import checkpoints as checkpoints_module
from surgery.train import losses as formulas
from surgery.train import plateau
from surgery.train import tracking as track
from surgery.train.checkpoint_files import fault_of
from surgery.train.checkpoints import checkpoints
from surgery.train.optimizer import adamw, base_size, learning_rate_factor, mark_trainable, spliced_parameters
from surgery.train.plateau import stage_lengths
from surgery.train.training import make_accelerator, train_model
from surgery.types import Graft, Plan
from tests.support.pico import pico_base, pico_family, pico_hybrid, pico_site, pico_tokenizer

SHAPE: dict[str, Any] = {"vocab_size": 1024, "layers": 2}
FAST = {"warmup": 0, "lr": 1e-2, "new_heads_lr": 1e-2}
KV = {"task": "kv_retrieval", "rows": 2, "pairs": (2, 2), "weights": {"answer": 1.0}}


def plan() -> Plan:
    config = pico_base(**SHAPE).config
    graft = Graft(family_of(config).mixers(config)[1], (2,), "add", "ssm", ("segment_end",))
    return Plan("base", geometry_of(config), (graft,), 0)


def hybrid() -> PreTrainedModel:
    return pico_hybrid([pico_site(1)], **SHAPE)


def section(**given: Any) -> Train:
    return Train.model_validate({"optimizer": FAST, "sources": [KV], **given} if "stages" not in given else given)


def stage(name: str, **given: Any) -> dict[str, Any]:
    return {"name": name, "steps": 2, "sources": [KV], "optimizer": FAST, **given}


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def moved(before: dict[str, Tensor], model: PreTrainedModel) -> set[str]:
    return {name for name, p in model.named_parameters() if not torch.equal(before[name], p)}


def without_time(history: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in history]


def fit(model: PreTrainedModel, train_section: Train, **more: Any) -> list[dict[str, float]]:
    return train_model(model, pico_tokenizer(), train_section, plan(), **more)


class TestStages:
    SECTION = section(stages=[stage("align", trainable="new_heads"), stage("distil", steps=3), stage("last", steps=1)])

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

    def test_the_documents_of_stages_differ(self) -> None:
        twice = section(stages=[stage("one", steps=1), stage("two", steps=1)])
        frozen = {**FAST, "lr": 1e-12, "new_heads_lr": 1e-12}
        twice = section(stages=[{**s.model_dump(), "optimizer": frozen} for s in twice.stages])
        first, second = fit(hybrid(), twice)
        assert first["answer"] != pytest.approx(second["answer"], abs=1e-6)

    @pytest.mark.parametrize("last", [1, 2, 3, 5])
    def test_a_stopped_run_goes_on_in_its_stage(self, tmp_path: Path, last: int) -> None:
        def stop(step: int, _: Any) -> None:
            if step == last:
                raise KeyboardInterrupt

        every = self.SECTION.model_copy(update={"save_every": 1})
        whole, again = hybrid(), hybrid()
        fit(whole, every)
        with pytest.raises(KeyboardInterrupt):
            fit(hybrid(), every, folder=tmp_path, on_step=stop)
        seen: list[int] = []
        history = fit(again, every, folder=tmp_path, on_step=lambda step, _: seen.append(step))
        assert moved(weights(whole), again) == set()
        assert [h["step"] for h in history] == [1, 2, 3, 4, 5, 6]
        # A step is kept once the next one has begun; a stage's last one when the next stage begins.
        assert seen[0] == last

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("later", ["new_heads", "lora", "spliced_layers"])
    @pytest.mark.parametrize("first", ["all", "lora", "spliced_layers"])
    def test_a_run_stopped_behind_a_wider_stage_keeps_its_base(
        self, tmp_path: Path, first: str, later: str, dtype: torch.dtype
    ) -> None:
        """Weights that the later stage freezes are no longer those of the base, which `base_kl` compares with."""
        text = {"task": "sentence", "rows": 1, "weights": {"base_kl": 1.0}}
        of_each: dict[str, Any] = {"sources": [KV, text], "lora": {"rank": 2}}
        stages = [stage("one", trainable=first, **{**of_each, "steps": 1}), stage("two", trainable=later, **of_each)]
        every = section(stages=stages, save_every=1)

        def stop(step: int, _: Any) -> None:
            if step == 3:
                raise KeyboardInterrupt

        whole, again, base = hybrid().to(dtype), hybrid().to(dtype), pico_base(**SHAPE).to(dtype)
        as_loaded = weights(base)
        expected = without_time(fit(whole, every, base=base))
        with pytest.raises(KeyboardInterrupt):
            fit(hybrid().to(dtype), every, base=pico_base(**SHAPE).to(dtype), folder=tmp_path, on_step=stop)
        resumed_with = pico_base(**SHAPE).to(dtype)
        assert without_time(fit(again, every, base=resumed_with, folder=tmp_path)) == expected
        assert moved(weights(whole), again) == set()
        assert moved(as_loaded, base) == moved(as_loaded, resumed_with) == set()

    def test_where_a_stage_s_checkpoints_are_broken_the_stage_before_goes_on(self, tmp_path: Path) -> None:
        """Without one, a stage cannot know what the stages before it have left."""

        def stop(step: int, _: Any) -> None:
            if step == 4:
                raise KeyboardInterrupt

        every = self.SECTION.model_copy(update={"save_every": 1})
        whole, again = hybrid(), hybrid()
        fit(whole, every)
        with pytest.raises(KeyboardInterrupt):
            fit(hybrid(), every, folder=tmp_path, on_step=stop)
        broken = checkpoints(tmp_path / "1-distil")
        assert len(broken) == 2
        for step in broken:
            (step / "optimizer.pt").write_bytes(b"")
        seen: list[int] = []
        history = fit(again, every, folder=tmp_path, on_step=lambda step, _: seen.append(step))
        assert seen[0] == 2, "from the newest checkpoint of the stage before"
        assert moved(weights(whole), again) == set()
        assert [h["step"] for h in history] == [1, 2, 3, 4, 5, 6]

    def test_later_stages_may_change_and_earlier_ones_may_not(self, tmp_path: Path) -> None:
        short = section(stages=[stage("align", trainable="new_heads"), stage("distil", steps=3)])
        fit(hybrid(), short, folder=tmp_path)
        seen: list[int] = []
        grown, whole = hybrid(), hybrid()
        history = fit(grown, self.SECTION, folder=tmp_path, on_step=lambda step, _: seen.append(step))
        fit(whole, self.SECTION)
        assert seen[-1] == 6 and len(seen) < 6 and [h["step"] for h in history] == [1, 2, 3, 4, 5, 6]
        assert moved(weights(whole), grown) == set()
        other = section(stages=[stage("align"), stage("distil", steps=3), stage("last", steps=1)])
        with pytest.raises(RunError, match="It belongs to another training"):
            fit(hybrid(), other, folder=tmp_path)

    def test_another_splice_does_not_continue(self, tmp_path: Path) -> None:
        """Its weights have the same shapes."""
        short = section(steps=3, save_every=1)
        fit(hybrid(), short, folder=tmp_path)
        config = pico_base(**SHAPE).config
        graft = Graft(family_of(config).mixers(config)[1], (3,), "add", "ssm", ("segment_end",))
        other = Plan("base", geometry_of(config), (graft,), 0)
        with pytest.raises(RunError, match="It belongs to another training"):
            train_model(hybrid(), pico_tokenizer(), short, other, folder=tmp_path)

    def test_a_control_leaves_out_what_trains_new_heads(self) -> None:
        base = pico_base(**SHAPE)
        history = fit(base, self.SECTION, control=True)
        assert [h["step"] for h in history] == [3, 4, 5, 6]

    @pytest.mark.parametrize(
        ("given", "says"),
        [
            ({"stages": [stage("a")], "steps": 3}, "set steps in each stage"),
            ({"stages": [stage("a"), stage("a")]}, "same name"),
            ({"stages": [{"name": "a"}]}, "no `sources`"),
            ({"sources": [{**KV, "weights": {"distil": 1.0}}]}, "needs a teacher"),
            ({"sources": [KV], "teacher": {"model": "x"}}, "no objective uses"),
            ({"sources": [KV], "tokens": 1000}, "needs `tokens` in every source"),
            ({"sources": [KV], "tokens": 1000, "steps": 3}, "not both"),
            ({"sources": [{**KV, "rows": None}]}, "set either `rows` or `tokens`"),
            ({"sources": [{**KV, "task": None}]}, "set either `task`"),
            ({"sources": [KV], "distil": {"cache": True}}, "needs `top_k`"),
        ],
    )
    def test_what_cannot_be_is_refused(self, given: dict[str, Any], says: str) -> None:
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
        every, whole = section(**self.ENDS, save_every=1), hybrid()
        expected = without_time(fit(whole, every))
        found = next(int(h["step"]) for h in expected if "last_step" in h)
        for last in (found, found + 1):

            def stop(step: int, _: Any, last: int = last) -> None:
                if step == last:
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                fit(hybrid(), every, folder=tmp_path / str(last), on_step=stop)
            again, seen = hybrid(), list[list[dict[str, float]]]()
            folder, record = tmp_path / str(last), lambda _, entries, seen=seen: seen.append(list(entries))
            assert without_time(fit(again, every, folder=folder, on_step=record)) == expected
            assert moved(weights(whole), again) == set()
            assert without_time(seen[0]) == expected[:last], "the callback has the steps of the stopped run too"

    def test_later_stages_begin_where_it_ends(self, tmp_path: Path) -> None:
        ends = stage("ends", **self.ENDS)
        made = section(stages=[ends, stage("fixed"), {**ends, "name": "again"}]).model_copy(update={"save_every": 1})
        model, again, seen = hybrid(), hybrid(), []
        history = fit(model, made)
        lengths = stage_lengths(history, made)
        assert [h["step"] for h in history] == list(range(1, sum(lengths) + 1))
        assert lengths[0] < 20 > lengths[2] and lengths[1] == 2

        def stop(step: int, _: Any) -> None:
            seen.append(step)
            if step == lengths[0] + 1:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fit(hybrid(), made, folder=tmp_path, on_step=stop)
        assert without_time(fit(again, made, folder=tmp_path)) == without_time(history)
        assert moved(weights(model), again) == set()

    @pytest.mark.parametrize("decided", [True, False])
    def test_the_main_process_decides(self, decided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where the losses of another process differed by rounding, it would find another step."""
        monkeypatch.setattr(plateau, "broadcast_object_list", lambda found: found.__setitem__(0, decided))
        settings = {**self.ENDS, "plateau": {"window": 4, "patience": 1}} if decided else self.ENDS
        assert len(fit(hybrid(), section(**settings))) == (round(4 / 0.7) if decided else 20)


class TestWhatTrains:
    def test_spliced_layers(self) -> None:
        model = hybrid()
        before = weights(model)
        fit(model, section(steps=1, trainable="spliced_layers"))
        assert moved(before, model) == {n for n in before if "layers.1." in n}
        base = pico_base(**SHAPE)
        before = weights(base)
        fit(base, section(steps=1, trainable="spliced_layers"), control=True)
        assert moved(before, base) == {n for n in before if "layers.1." in n}, "the control trains the same layers"

    def test_lora_trains_new_heads_whole_and_the_rest_a_little(self, tmp_path: Path) -> None:
        model, fresh, given = hybrid(), hybrid(), section(steps=2, trainable="lora", lora={"rank": 2})
        before = weights(model)
        fit(model, given, outputs=tmp_path)
        changed = moved(before, model)
        assert {n for n in changed if ".attention." not in n} == {
            f"backbone.layers.{k}.mixer.{part}_proj.weight" for k in (0, 1) for part in ("in", "out")
        }
        assert {n for n in before if ".attention." in n} <= changed
        difference = model.backbone.layers[0].mixer.in_proj.weight - before["backbone.layers.0.mixer.in_proj.weight"]
        assert torch.linalg.matrix_rank(difference, rtol=1e-3) <= 2
        ids = torch.arange(2, 14)[None]
        loaded = PeftModel.from_pretrained(fresh, str(tmp_path / "adapters"))
        with torch.no_grad():
            torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("first", ["new_heads", "lora", "all"])
    def test_adapters_are_those_that_fit_to_the_spliced_model(self, first: str, tmp_path: Path) -> None:
        """After a stage that changed the base's weights, they would not: PEFT would load another model."""
        model, fresh = hybrid(), hybrid()
        lora = {"trainable": "lora", "lora": {"rank": 2}}
        stages = [stage("first", trainable=first, lora={"rank": 2}), stage("second", **lora)]
        fit(model, section(stages=stages), outputs=tmp_path)
        saved = {path.name for path in (tmp_path / "adapters").glob("*")}
        assert saved == {"new_heads": {"second"}, "lora": {"first"}, "all": set()}[first]
        if first == "new_heads":
            ids = torch.arange(2, 14)[None]
            loaded = PeftModel.from_pretrained(fresh, str(tmp_path / "adapters" / "second"))
            with torch.no_grad():
                torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)

    def test_supervision_reaches_the_head_beside_lora(self) -> None:
        source = {**KV, "weights": {"attention": 1.0}}
        model = hybrid()
        before = weights(model)
        fit(model, section(steps=1, trainable="lora", sources=[source], lora={"targets": ["in_proj"]}))
        assert "backbone.layers.1.mixer.attention.qkv_proj.weight" in moved(before, model)

    @pytest.mark.parametrize("precision", ["bf16", "fp32"])
    @pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
    def test_a_base_in_half_precision_trains_fp32_weights_and_gives_the_dtypes_back(
        self, precision: str, half: torch.dtype
    ) -> None:
        model, seen = hybrid().to(half), []
        own = {id(p) for p in spliced_parameters(model)}

        def on_step(*_: Any) -> None:
            seen.append({p.dtype for p in model.parameters() if id(p) in own})
            seen.append({p.dtype for p in model.parameters() if id(p) not in own})

        history = fit(model, section(steps=1, trainable="new_heads", precision=precision), on_step=on_step)
        assert seen == [{torch.float32}, {half}] and history[0]["loss"] > 0
        assert {p.dtype for p in model.parameters()} == {half}

    def test_default_rates_are_those_of_the_base_without_its_new_heads(self) -> None:
        from surgery.recipe.optimizer import rates

        model = hybrid()
        new = {id(p) for p in spliced_parameters(model)}
        size = sum(p.numel() for p in model.parameters() if id(p) not in new)
        assert base_size(model) == size
        groups = adamw(model, list(model.parameters()), Optimizer(lr_factor=0.5)).param_groups
        found = {id(p): g["lr"] for g in groups for p in g["params"]}
        base, heads = rates(size)
        assert {found[p] for p in new} == {heads}
        assert {rate for p, rate in found.items() if p not in new} == {base / 2}

    @pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "mamba2"])
    def test_the_state_s_own_time_scales_have_no_weight_decay(self, name: str) -> None:
        """A_log is a matrix in Mamba-1. Decay would pull every time scale to the same value."""
        model = pico_family(name)
        groups = adamw(model, list(model.parameters()), Optimizer(lr=1e-3, weight_decay=0.1)).param_groups
        decays = {id(p): g["weight_decay"] for g in groups for p in g["params"]}
        found = {n.rpartition(".")[2]: decays[id(p)] for n, p in model.named_parameters()}
        assert found["A_log"] == found["D"] == 0.0
        assert {decays[id(p)] for n, p in model.named_parameters() if n.endswith("in_proj.weight")} == {0.1}

    def test_rates_of_adapters_are_their_own(self) -> None:
        from surgery.recipe import Lora
        from surgery.train.lora import Adapters, adapter_parameters

        model, settings = hybrid(), Optimizer(lr=1e-4, new_heads_lr=1e-3, lora_lr=1e-2)
        Adapters(model, Lora(rank=2))
        parameters = mark_trainable(model, section(trainable="lora"))
        rates = {id(p): g["lr"] for g in adamw(model, parameters, settings).param_groups for p in g["params"]}
        assert {rates[id(p)] for p in adapter_parameters(model)} == {1e-2}
        assert {rates[id(p)] for p in spliced_parameters(model)} == {1e-3}
        assert len(rates) == len(parameters)


class TestTeacher:
    @pytest.fixture(scope="class")
    def teacher(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("teacher")
        pico_family("llama", vocab_size=1024, hidden_size=32).save_pretrained(folder)
        pico_tokenizer().save_pretrained(folder)
        return folder

    def test_every_stage_lowers_its_distance(self, teacher: Path) -> None:
        def aligned(name: str) -> dict[str, Any]:
            return stage(name, steps=8, sources=[{**KV, "weights": {name: 1.0}}], align={"heads": {"L1H2": "L0H1"}})

        names = ("attention_mse", "hidden_mse", "distil", "attention_kl")
        stages = [aligned(name) for name in names]
        history = fit(hybrid(), section(stages=stages, teacher={"model": str(teacher)}))
        for begin, name in zip((0, 8, 16, 24), names, strict=True):
            part = [h[name] for h in history[begin : begin + 8]]
            assert sum(part[-3:]) < sum(part[:3]) and min(part) > 0, name

    def test_a_cache_gives_the_same_run_without_the_teacher(
        self, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from surgery.train.teacher import Teacher

        source = {**KV, "weights": {"distil": 1.0}}
        given = section(steps=2, sources=[source], distil={"top_k": 8, "cache": True}, teacher={"model": str(teacher)})
        first, second, asked = hybrid(), hybrid(), []
        one = fit(first, given, outputs=tmp_path)
        real = Teacher.outputs
        monkeypatch.setattr(Teacher, "outputs", lambda self, batch, want: asked.append(want) or real(self, batch, want))
        two = fit(second, given, outputs=tmp_path)
        assert [h["distil"] for h in one] == [h["distil"] for h in two]
        assert moved(weights(first), second) == set() and not any(asked)

    @pytest.mark.parametrize("later", [{"teacher": {"dtype": "bfloat16"}}, {"precision": "bf16"}])
    def test_another_precision_has_a_cache_of_its_own(
        self, teacher: Path, tmp_path: Path, later: dict[str, Any]
    ) -> None:
        sources = [{**KV, "weights": {"distil": 1.0}}]
        given: dict[str, Any] = {"steps": 1, "sources": sources, "distil": {"top_k": 8, "cache": True}}
        fit(hybrid(), section(**given, teacher={"model": str(teacher)}), outputs=tmp_path)
        changed = {**given, **later, "teacher": {"model": str(teacher), **later.get("teacher", {})}}
        fit(hybrid(), section(**changed), outputs=tmp_path)
        names = sorted(folder.name for folder in (tmp_path / "teacher_logits").iterdir())
        assert len(names) == 2 and all(name.startswith("top8-") for name in names)

    def test_students_with_different_vocabularies_do_not_share_a_cache(self, tmp_path: Path) -> None:
        size = len(pico_tokenizer())
        pico_family("llama", vocab_size=size + 100).save_pretrained(tmp_path / "teacher")
        pico_tokenizer().save_pretrained(tmp_path / "teacher")
        given = section(
            steps=1,
            sources=[{**KV, "weights": {"distil": 1.0}}],
            distil={"top_k": 8, "cache": True},
            teacher={"model": str(tmp_path / "teacher")},
        )

        def losses(vocab_size: int, outputs: Path) -> list[float]:
            torch.manual_seed(0)
            return [h["distil"] for h in fit(pico_base(vocab_size=vocab_size, layers=1), given, outputs=outputs)]

        alone = losses(size + 100, tmp_path / "alone")
        losses(size, tmp_path / "shared")
        assert losses(size + 100, tmp_path / "shared") == alone

    def test_a_teacher_of_other_tokens_is_refused(self, tmp_path: Path) -> None:
        from surgery.data.tokenizer import build_tokenizer

        pico_family("llama", vocab_size=1024).save_pretrained(tmp_path)
        build_tokenizer(600).save_pretrained(tmp_path)
        source = {**KV, "weights": {"distil": 1.0}}
        with pytest.raises(RecipeError, match="its tokenizer differs from the base's"):
            fit(hybrid(), section(steps=1, sources=[source], teacher={"model": str(tmp_path)}))


class TestSchedules:
    def test_wsd_is_flat_and_then_a_line(self) -> None:
        settings = Optimizer(warmup=10, schedule="wsd", decay=0.2, floor=0.1)
        factors = [learning_rate_factor(step, 100, settings) for step in range(101)]
        assert factors[10:80] == [1.0] * 70 and factors[90] == pytest.approx(0.55) and factors[100] == 0.1

    def test_constant_stays(self) -> None:
        settings = Optimizer(warmup=2, schedule="constant")
        assert [learning_rate_factor(s, 9, settings) for s in range(9)] == pytest.approx([1 / 3, 2 / 3, *[1.0] * 7])

    def test_weights_change_over_a_stage(self) -> None:
        frozen = {**FAST, "lr": 1e-12, "new_heads_lr": 1e-12}
        ramp, full = ({**KV, "weights": {"answer": w}} for w in ([1.0, 0.0], 1.0))
        down = fit(hybrid(), section(steps=3, sources=[ramp], optimizer=frozen))
        flat = fit(hybrid(), section(steps=3, sources=[full], optimizer=frozen))
        shares = [a["answer"] / b["answer"] for a, b in zip(down, flat, strict=True)]
        assert shares == pytest.approx([1.0, 0.5, 0.0], abs=1e-5)


class TestTrackers:
    def test_losses_go_there_too(self, tmp_path: Path) -> None:
        pytest.importorskip("tensorboard")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        history = fit(hybrid(), section(steps=3, trackers=["tensorboard"]), outputs=tmp_path)
        events = EventAccumulator(str(tmp_path / "logs" / "hybrid" / "surgery"))
        events.Reload()
        assert [e.value for e in events.Scalars("train/answer")] == pytest.approx([h["answer"] for h in history])
        assert [e.step for e in events.Scalars("train/answer")] == [1, 2, 3]

    def test_one_that_is_not_installed_is_an_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(track, "find_spec", lambda name: None)
        with pytest.raises(RecipeError, match="pip install wandb"):
            fit(hybrid(), section(steps=1, trackers=["wandb"]), outputs=tmp_path)
        assert list(tmp_path.iterdir()) == []


class TestTrouble:
    def test_a_loss_that_grows_stops_the_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[int] = []
        real = formulas.answer_loss

        def growing(*given: Any) -> Tensor:
            calls.append(1)
            return real(*given) * (1 + len(calls) / 5)

        monkeypatch.setattr(formulas, "answer_loss", growing)
        still = {"warmup": 0, "lr": 1e-9, "new_heads_lr": 1e-9}
        with pytest.raises(TrainingDiverged, match=r"train step \d+: loss .* for answer"):
            fit(hybrid(), section(steps=60, optimizer=still))
        assert len(calls) < 10, "the model guesses at first; three times that is far above twice a guess"

    @pytest.mark.parametrize("steps", [4, 8])
    def test_a_learning_rate_that_breaks_the_model_stops_the_run(self, tmp_path: Path, steps: int) -> None:
        model, wild = hybrid(), {"warmup": 0, "lr": 1.0, "new_heads_lr": 1.0}
        with pytest.raises(TrainingDiverged, match=r"train step 4: .*No checkpoint was saved yet") as caught:
            fit(model, section(steps=steps, optimizer=wild), folder=tmp_path)
        assert math.isfinite(float(str(caught.value.value).split()[1]))
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(("at", "saved"), [(1, 0), (3, 1)])
    def test_a_compiler_that_fails_names_the_key_and_leaves_whole_steps(
        self, tmp_path: Path, at: int, saved: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In the first step, or where a later one has other shapes."""
        model, calls = hybrid(), []

        def forward(*given: Any, **named: Any) -> Any:
            calls.append(1)
            if len(calls) == at:
                raise InductorError(RuntimeError("No working C++ compiler found in cxx: (None, '/nonexistent')"), None)
            return real(*given, **named)

        real = model.forward
        monkeypatch.setattr(model, "compile", lambda: monkeypatch.setattr(model, "forward", forward))
        with pytest.raises(
            RunError, match=r"train\.compile: true \(.*No working C\+\+ compiler.*set train\.compile to false"
        ):
            fit(model, section(steps=3, save_every=1, compile=True), folder=tmp_path)
        assert [fault_of(step) for step in checkpoints(tmp_path)] == [None] * saved

    def test_a_fault_of_the_model_is_not_the_compiler_s(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = hybrid()

        def forward(*given: Any, **named: Any) -> Any:
            raise RuntimeError("shapes cannot be multiplied")

        monkeypatch.setattr(model, "compile", lambda: monkeypatch.setattr(model, "forward", forward))
        with pytest.raises(RuntimeError, match="multiplied"):
            fit(model, section(steps=1, compile=True))

    def test_a_full_disk_is_said_and_the_last_step_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real, calls = checkpoints_module.save_file, []

        def full(*given: Any, **named: Any) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(*given, **named)

        monkeypatch.setattr(checkpoints_module, "save_file", full)
        with pytest.raises(RunError, match=r"The disk is full. step_000001 is kept"):
            fit(hybrid(), section(steps=4, save_every=1), folder=tmp_path)
        assert [p.name for p in tmp_path.iterdir()] == ["step_000001"] == [p.name for p in checkpoints(tmp_path)]
        monkeypatch.undo()
        whole, again = hybrid(), hybrid()
        fit(whole, section(steps=4, save_every=1))
        fit(again, section(steps=4, save_every=1), folder=tmp_path)
        assert moved(weights(whole), again) == set()


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
