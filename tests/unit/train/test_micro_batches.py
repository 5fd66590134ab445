"""However a step is cut up, its gradient is the same; and what happens when memory does not do."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from surgery.data.generated import GeneratedStream
from surgery.data.user import open_source
from surgery.errors import RunError
from surgery.models.lookup import family_of
from surgery.models.torch_scans import torch_scans
from surgery.probes.documents import Document, Question
from surgery.recipe import Source, Train
from surgery.train.micro_batches import MicroBatch, StepSplit, log_missing_reads, step_counts
from surgery.train.targets import Targets, logits_at
from surgery.types import Graft
from tests.support import training_worker as worker
from tests.support.own_data import write
from tests.support.pico import pico_base, pico_hybrid, pico_site, pico_tokenizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return worker.gradients(tmp_path_factory.mktemp("whole"))


def assert_same(found: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
    scale = torch.stack([g.norm() for g in whole.values()]).norm()
    apart = torch.stack([(found[name] - g).norm() for name, g in whole.items()]).norm()
    assert found.keys() == whole.keys() and float(apart / scale) < 1e-5


def test_no_way_to_compute_a_step_changes_its_gradient(tmp_path: Path, whole: dict[str, torch.Tensor]) -> None:
    for more in ({"micro_batch": 1}, {"micro_batch": 2}, {"gradient_checkpointing": True}):
        assert_same(worker.gradients(tmp_path, **more), whole)


def test_out_of_memory_halves_the_micro_batch_and_keeps_the_step(
    tmp_path: Path, whole: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """More than two documents do not fit; the gradient is that of all five."""
    real = Targets.weighted_losses

    def small(self: Any, model: Any, sources: Any, batch: Any, *given: Any) -> Any:
        if len(batch) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 PiB")
        return real(self, model, sources, batch, *given)

    monkeypatch.setattr(Targets, "weighted_losses", small)
    assert_same(worker.gradients(tmp_path), whole)
    assert "out of memory; train.sources" in caplog.text


def test_one_document_that_does_not_fit_is_an_error_and_others_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, says in (
        (torch.OutOfMemoryError("CUDA out of memory."), "Out of memory with one document"),
        (RuntimeError("shapes do not match"), "shapes do not match"),
    ):

        def fail(*_: Any, error: Exception = error, **__: Any) -> Any:
            raise error

        monkeypatch.setattr(Targets, "weighted_losses", fail)
        with pytest.raises((RunError, RuntimeError), match=says):
            worker.gradients(tmp_path)


SOURCES: tuple[dict[str, Any], ...] = (
    {"task": "kv_retrieval", "pairs": [20, 20], "rows": 2, "weights": {"answer": 1.0}},
    {"task": "sentence", "rows": 5, "weights": {"base_kl": 1.0}},
    {"task": "closed_book", "rows": 3, "weights": {"base_kl": [0.5, 2.0], "answer": 0.5}},
    {"task": "sentence", "rows": 4, "weights": {"lm": 1.0}},
    {"task": "kv_retrieval", "pairs": [4, 4], "rows": 3, "weights": {"answer": 2.0, "lm": 0.5}},
)


def split_of(*sources: dict[str, Any], **options: Any) -> tuple[list[Source], list[MicroBatch]]:
    """Sources, and the micro-batches of one step."""
    checked = [Source.model_validate(source) for source in sources]
    documents = [GeneratedStream(source, pico_tokenizer(), 0, index).step(0) for index, source in enumerate(checked)]
    return checked, StepSplit(checked, **options)(documents, pico_tokenizer())


def test_sources_share_passes() -> None:
    for options, passes in (
        ({"packing": True}, [(0, 3, 4), (1, 2)]),  # one for each set of models that run
        ({"pass_cost": 10**6}, [(0, 3, 4), (1, 2)]),
        ({}, [(3, 4), (0,), (1, 2)]),  # long documents apart: padding costs more than a pass
        ({"packing": True, "world": 2}, [(0, 3, 4), (1, 2)]),
        ({"world": 2}, [(0,), (1,), (2,), (3,), (4,)]),  # padded passes of processes have to be the same
    ):
        _, parts = split_of(*SOURCES, **options)
        assert sorted(part.sources for part in parts) == sorted(passes), options


def losses_and_gradients(parts: list[MicroBatch], sources: list[Source]) -> tuple[Counter[str], list[Any]]:
    model, base = (pico_base(seed, vocab_size=1024, layers=2) for seed in (0, 1))
    counts, losses = step_counts(sources, parts, False, Accelerator(cpu=True)), Counter[str]()
    for part in parts:
        given = {index: sources[index] for index in part.sources}
        with torch_scans(model, base):
            found = Targets(base=base).weighted_losses(model, given, part.batch, counts, 0.25)
            torch.stack(list(found.values())).sum().backward()
        losses.update({name: float(loss.detach()) for name, loss in found.items()})
    return losses, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("options", [{"pass_cost": 10**6}, {}, {"limit": 2}], ids=str)
def test_shared_passes_have_the_losses_and_gradients_of_separate_ones(options: dict[str, Any]) -> None:
    sources, parts = split_of(*SOURCES, **options)
    alone = [part for index in range(len(SOURCES)) for part in _only(index)]
    found, gradients = losses_and_gradients(parts, sources)
    expected, expected_gradients = losses_and_gradients(alone, sources)
    assert found == pytest.approx(expected, rel=1e-4) and found.keys() == {"answer", "base_kl", "lm"}
    for one, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def _only(index: int) -> list[MicroBatch]:
    """The documents of one source of `SOURCES`, in a pass of their own."""
    source = Source.model_validate(SOURCES[index])
    (part,) = StepSplit([source], pass_cost=10**6)([GeneratedStream(source, None, 0, index).step(0)], pico_tokenizer())
    return [replace(part, sources=(index,), counts={(index, name): n for (_, name), n in part.counts.items()})]


@pytest.mark.parametrize("packing", [False, True])
def test_answers_alone_need_the_logits_before_them_only(packing: bool) -> None:
    """The same loss and gradient, from a fraction of the rows of the head."""
    sources, (part,) = split_of(
        SOURCES[0], {**SOURCES[4], "weights": {"answer": 2.0}}, pass_cost=10**6, packing=packing
    )
    given, counts = dict(enumerate(sources)), step_counts(sources, [part], False, Accelerator(cpu=True))
    model, targets, found = pico_base(vocab_size=1024, layers=2), Targets(), []
    for rows in (None, targets.logit_rows(given, part.batch)):
        model.zero_grad()
        with torch_scans(model), logits_at(model, rows):
            loss = targets.weighted_losses(model, given, part.batch, counts, rows=rows)["answer"]
            loss.backward()
        found.append((loss, [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    assert rows is not None and 0 < len(rows) < part.batch.input_ids.numel() / 10
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    assert Targets().logit_rows({0: Source.model_validate(SOURCES[4])}, part.batch) is None, "lm reads all"


def found_in_prompts(tmp_path: Path, prompts: list[str], span: str | None = "auto") -> tuple[Source, list[Any]]:
    """A source with these prompts, all with the answer 7, and its documents."""
    rows = [{"prompt": prompt, "answer": "7", "answer_span": [2, 3]} for prompt in prompts]
    for row in rows if span == "auto" else ():
        del row["answer_span"]
    path = write(tmp_path / f"{span}{len(prompts)}.jsonl", rows)
    data = {"path": str(path), "columns": {"answer_span": span}}
    given = {"data": data, "rows": len(prompts), "weights": {"answer": 1.0, "attention": 1.0}}
    source = Source.model_validate(given)
    return source, sorted(open_source(source, pico_tokenizer(), 0, 0).step(0), key=lambda document: document.text)


ONCE, TWICE, ABSENT = ["a:7\nb:8\na?\n", "c:7\nb:8\nc?\n"], ["a:7\nb:7\na?\n"], ["b:8\na?\n"]


def losses_of(source: Source, documents: list[Any]) -> dict[str, float]:
    """Losses of one step of a small hybrid."""
    hybrid, tokenizer, accelerator = (
        pico_hybrid([pico_site(1, [1, 3])], **worker.SHAPE),
        pico_tokenizer(),
        Accelerator(cpu=True),
    )
    graft = Graft(family_of(hybrid.config).sites(hybrid.config)[1], (1, 3), "add", "ssm", ("answer_token",) * 2)
    (part,) = StepSplit([source], pass_cost=10**6)([documents], tokenizer)
    counts = step_counts([source], [part], True, accelerator)
    losses = Targets(grafts=(graft,)).weighted_losses(hybrid, {0: source}, part.batch, counts)
    return {name: float(loss) for name, loss in losses.items()}


def test_rows_without_a_gold_position_count_for_answers_only(tmp_path: Path) -> None:
    """The attention loss is the mean over the rows in which the answer is found, as if they were alone."""
    alone = losses_of(*found_in_prompts(tmp_path, ONCE))
    mixed = losses_of(*found_in_prompts(tmp_path, [*ONCE, *TWICE, *ABSENT]))
    marked = losses_of(*found_in_prompts(tmp_path, ONCE, "answer_span"))
    assert mixed["attention"] == pytest.approx(alone["attention"], rel=1e-5) and marked == alone
    assert mixed["answer"] != pytest.approx(alone["answer"], rel=1e-5)


def test_a_step_in_which_no_answer_is_found_has_no_attention_loss(tmp_path: Path) -> None:
    losses = losses_of(*found_in_prompts(tmp_path, [*TWICE, *ABSENT]))
    assert losses["attention"] == 0 and losses["answer"] > 0


def test_elsewhere_an_objective_without_terms_is_refused(tmp_path: Path) -> None:
    source, documents = found_in_prompts(tmp_path, TWICE, "answer_span")
    bare = [replace(d, questions=(replace(d.questions[0], value=None, segment=None),)) for d in documents]
    with pytest.raises(RunError, match=r"train\.sources \(.*\)\.weights: attention.*Set the weight to 0"):
        losses_of(source, bare)


def test_answer_tokens_without_a_place_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    stage = Train.model_validate(
        {"steps": 1, "sources": [{"task": "kv_retrieval", "rows": 1, "weights": {"attention": 1.0}}]}
    )
    tokens = len(pico_tokenizer().encode("712", add_special_tokens=False))
    for value, missing in (("712", 0), ("seven", 3 * (tokens - 1))):
        prompt = f"blue:{value}\nblue is"
        question = Question((len(prompt), len(prompt) + 3), (), -1, (0, 6 + len(value)), (5, 5 + len(value)))
        log_missing_reads(stage, [[Document("made_up", f"{prompt}712", (question,))] * 3], pico_tokenizer())
        text = f"train.sources (kv_retrieval): no token of the segment holds {missing} of {3 * tokens} answer tokens"
        assert tokens > 1 and (text in caplog.text) == bool(missing), value
