"""A packed step is the padded step: same loss, same gradient, for every objective and way of training.

Kernels are stand-ins in plain torch (`tests/support/kernels.py`), in both steps; our scans run without them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from surgery.data.encoding import EncodedBatch
from surgery.probes.documents import rng_of
from surgery.probes.kv_retrieval import kv_document
from surgery.recipe import Train
from surgery.train import packing as packed
from surgery.train.logits_cache import LogitsCache
from surgery.train.objectives import Outputs
from surgery.train.packing import packing_fault, separate_documents
from surgery.train.targets import Targets
from surgery.train.teacher import Teacher
from surgery.train.trainer import StageTrainer
from tests.support.battery import base as base_of
from tests.support.battery import trained
from tests.support.kernels import with_kernels
from tests.support.own_data import write
from tests.support.pico import pico_base, pico_family, pico_tokenizer, tokens
from tests.support.rounding import assert_close_in_ulps
from tests.support.training_worker import record_gradients
from tests.unit.train.common import SHAPE, hybrid, plan, without_time

SCANS = ("mamba2", "mamba2attn", "bamba", "granite", "zamba2", "nemotron_h", "falcon_h1")
WITHOUT = ("mamba", "falcon_mamba", "llamba")
TRANSFORMERS = ("llama", "qwen2", "gpt_neox")
PAIRS = (9, 2, 3, 2, 2)


def own(folder: Path, weights: dict[str, float], text: bool = False, **more: Any) -> dict[str, Any]:
    """Dictionaries of very different lengths: several of the short ones fit into a row of the longest."""
    documents = [kv_document(rng_of("packed", i), pairs) for i, pairs in enumerate(PAIRS)]
    rows: list[dict[str, Any]] = []
    for document in documents:
        (question,) = document.questions
        cut = question.answer[0]
        row = {"prompt": document.text[:cut], "answer": document.text[slice(*question.answer)], "span": question.value}
        rows.append({"text": document.text} if text else row)
    path = write(folder / f"{'text' if text else 'rows'}.jsonl", rows)
    columns = {"text": "text"} if text else {"answer_span": "span"}
    return {"data": {"path": str(path), "columns": columns}, "rows": len(rows), "weights": weights, **more}


def section(folder: Path, *weights: dict[str, float], steps: int = 1, **more: Any) -> Train:
    given = weights or ({"answer": 1.0, "attention": 0.5}, {"base_kl": 1.0, "lm": 0.5})
    sources = [own(folder, w, text="answer" not in w and "attention" not in w) for w in given]
    teaches = any(set(w) & {"distil", "attention_mse", "attention_kl", "hidden_mse"} for w in given)
    rates = {"warmup": 1, "lr": 1e-3, "new_heads_lr": 1e-3}
    made = {"steps": steps, "sources": sources, "optimizer": rates, **({"teacher": {"model": "x"}} if teaches else {})}
    return Train.model_validate({**made, **more})


def trainer(train: Train, control: bool = False, **more: Any) -> StageTrainer:
    model = pico_base(**SHAPE) if control else hybrid()
    grafts = () if control else plan().grafts
    teacher = None
    if train.needs_teacher:
        llama = pico_family("llama", vocab_size=1024, num_hidden_layers=2)
        teacher = Teacher(llama, pico_tokenizer(), model.config, grafts, train.align, train.needs)
    targets = Targets(base=pico_base(**SHAPE), grafts=grafts, teacher=teacher, **more)
    return StageTrainer(model, pico_tokenizer(), train, 0, Accelerator(cpu=True), targets)


def packs(train: Train) -> bool:
    made = trainer(train)
    made.prepare()
    return made.split.packing


def first_step(train: Train, monkeypatch: pytest.MonkeyPatch, **more: Any) -> tuple[dict, dict[str, Tensor], list]:
    """Losses, gradients and batches."""
    made = trainer(train, **more)
    seen: list[EncodedBatch] = []
    real = Targets.weighted_losses

    def watched(self: Targets, model: Any, source: Any, batch: EncodedBatch, *rest: Any) -> Any:
        seen.append(batch)
        return real(self, model, source, batch, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Targets, "weighted_losses", watched)
        gradients = record_gradients(made)
        (entry,) = made.run()
    return without_time([entry])[0], gradients, seen


def check_same(train: Callable[[bool], Train], monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    losses, gradients, batches = first_step(train(False), monkeypatch, **more)
    packed_losses, packed_gradients, packed_batches = first_step(train(True), monkeypatch, **more)
    assert all(batch.documents is None for batch in batches)
    assert all(batch.documents is not None for batch in packed_batches)
    assert sum(map(len, packed_batches)) < sum(map(len, batches))
    assert packed_losses == pytest.approx(losses, rel=1e-5) and packed_losses["tokens"] == losses["tokens"]
    assert packed_gradients.keys() == gradients.keys()
    scale = torch.stack([g.norm() for g in gradients.values()]).norm()
    apart = torch.stack([(packed_gradients[n] - g).norm() for n, g in gradients.items()]).norm()
    assert float(scale) > 0 and float(apart / scale) < 1e-5


def test_a_step_of_every_objective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_kernels(monkeypatch)
    for given in (
        {"answer": 1.0, "attention": 0.5},
        {"answer": 1.0},
        {"lm": 1.0},
        {"base_kl": 1.0},
        {"distil": 1.0},
        {"attention": 0.5, "attention_kl": 1.0, "attention_mse": 1.0},
        {"hidden_mse": 1.0},
    ):
        check_same(lambda packing, w=given: section(tmp_path, w, packing=packing), monkeypatch)  # type: ignore[misc]


@pytest.mark.parametrize("fuses", [True, False], ids=["fused", "unfused"])
def test_a_step_of_every_way_to_train(fuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers, attention supervision, text and the frozen base at once."""
    with_kernels(monkeypatch, fuses=fuses)
    ways: tuple[dict[str, Any], ...] = (
        {"trainable": "lora", "lora": {"rank": 2}},
        {"trainable": "new_heads", "gradient_checkpointing": True},
        {"trainable": "spliced_layers"},
        {"distil": {"top_k": 5, "divergence": "reverse"}},
    )
    for more in ways:
        check_same(lambda packing, m=more: section(tmp_path, packing=packing, **m), monkeypatch)  # type: ignore[misc]


def test_a_step_with_matrices_that_are_shifted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_kernels(monkeypatch)
    align = {"offsets": {"L1H2": -2}}
    check_same(lambda packing: section(tmp_path, {"attention_mse": 1.0}, align=align, packing=packing), monkeypatch)


def test_a_step_with_logits_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_kernels(monkeypatch)
    distil = {"top_k": 5, "cache": True}

    def opened() -> LogitsCache:
        return LogitsCache(tmp_path / "cache", {"teacher": "x"})

    train = {packing: section(tmp_path, {"distil": 1.0}, distil=distil, packing=packing) for packing in (0, 1)}
    losses, *_ = first_step(train[0], monkeypatch, cache=opened())
    monkeypatch.setattr(Teacher, "outputs", lambda *_: Outputs())
    found, *_ = first_step(train[1], monkeypatch, cache=opened())
    assert found == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("control", [False, True], ids=["hybrid", "control"])
def test_a_step_in_our_scans(control: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, without kernels. transformers' own class, which hands no keyword on, is what trains as a control."""
    weights = ({"answer": 1.0}, {"lm": 1.0, "base_kl": 1.0})
    check_same(lambda packing: section(tmp_path, *weights, packing=packing), monkeypatch, control=control)


@pytest.mark.parametrize("trainable", ["all", "new_heads", "lora"])
def test_a_base_in_half_precision_packs(trainable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What trains is in fp32, what does not in bf16."""
    with_kernels(monkeypatch)
    made = trainer(section(tmp_path, trainable=trainable, packing=True))
    made.model.bfloat16()
    made.targets.base.bfloat16()
    made.prepare()
    assert made.split.packing


def test_a_weight_that_ends_does_not_leave_logits_on_disk_behind(tmp_path: Path) -> None:
    """Its source keeps its tokens, of which the cache has logits."""
    sources = [own(tmp_path, {"distil": [1.0, 0.0]}), own(tmp_path, {"distil": 1.0})]
    given = {"sources": sources, "steps": 2, "teacher": {"model": "x"}, "distil": {"top_k": 5, "cache": True}}
    made = trainer(Train.model_validate(given), cache=LogitsCache(tmp_path / "cache", {"teacher": "x"}))
    assert len(made.run()) == 2


class TestWhereItIsRefused:
    def test_the_padded_step_is_taken_and_said(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuses(_: Any) -> bool:
            raise ValueError("seq_idx: this scan takes none")

        monkeypatch.setattr(packed, "_leaks", refuses)
        assert not packs(section(tmp_path, packing=True))
        (said,) = (record.message for record in caplog.records if "train.packing" in record.message)
        assert "finetune has its own padded row" in said and "this scan takes none" in said

    def test_the_frozen_base_and_the_teacher_are_asked_too(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(packed, "_leaks", lambda model: model.config.model_type in ("mamba2", "llama"))
        for given, says in ((), "the frozen base"), (({"distil": 1.0},), "the teacher"):
            assert not packs(section(tmp_path, *given, packing=True))
            assert f"{says}: a document changes" in caplog.text
            caplog.clear()
        assert packs(section(tmp_path, {"lm": 1.0}, packing=True)) and not caplog.text, "the base is not used"
        assert not packs(section(tmp_path, packing=True, compile=True)) and "torch.compile" in caplog.text


class TestAsking:
    def test_who_keeps_documents_apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With kernels and in our scans. Mamba-1 of transformers takes the argument, and drops it without a word."""
        assert all(packing_fault({"it": base_of(name)}) is None for name in SCANS)
        with_kernels(monkeypatch)
        for name in (*SCANS, *TRANSFORMERS):
            assert packing_fault({"it": base_of(name)}) is None, name
            if name in SCANS and name != "falcon_h1":
                assert packing_fault({"it": trained(name)}) is None, name
        for name in WITHOUT:
            says = "takes no seq_idx" if name == "llamba" else "a document changes the logits of the next one"
            assert says in str(packing_fault({"it": base_of(name)})), name
            assert "takes no seq_idx" in str(packing_fault({"it": trained(name)})), name
        model, before = base_of("mamba2"), torch.get_rng_state()
        packing_fault({"it": model})
        assert torch.equal(torch.get_rng_state(), before), "random numbers stay as they were"

    def test_a_kernel_that_leaks_is_found_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for leak in ("reset_state", "reset_convolution"):
            with monkeypatch.context() as patch:
                with_kernels(patch, **{leak: False})  # type: ignore[arg-type]
                assert "a document changes the logits of the next one" in str(packing_fault({"it": trained("mamba2")}))

    def test_stock_models_say_of_each_document_what_they_say_of_it_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with_kernels(monkeypatch)
        texts = [tokens(1, length, length)[0] for length in (9, 5, 7)]
        index = torch.arange(3, dtype=torch.int32).repeat_interleave(torch.tensor([9, 5, 7]))[None]
        ids = torch.cat(texts)[None]
        for name in (*SCANS, *TRANSFORMERS):
            model = base_of(name)
            with torch.no_grad():
                expected = torch.cat([model(text[None], use_cache=False).logits[0] for text in texts])
                with separate_documents(model, index):
                    found = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
                after = model(ids, use_cache=False).logits[0]
            assert_close_in_ulps(found, expected, 16)
            assert not torch.allclose(after, expected, atol=1e-3), f"{name}: outside they are one text again"
