"""However a step is cut up, its gradient is the same; and what happens when memory does not do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from surgery.data.encoding import EncodedBatch, encode
from surgery.data.generated import step_documents
from surgery.data.user import open_source
from surgery.errors import RunError
from surgery.models.lookup import family_of
from surgery.recipe import Source
from surgery.testing.pico import pico_hybrid, pico_site, pico_tokenizer
from surgery.train.micro_batches import split_step, with_counts
from surgery.train.targets import Targets
from surgery.types import Graft
from tests.support import training_worker as worker


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return worker.gradients(tmp_path_factory.mktemp("whole"))


def assert_same(found: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
    scale = torch.stack([g.norm() for g in whole.values()]).norm()
    apart = torch.stack([(found[name] - g).norm() for name, g in whole.items()]).norm()
    assert found.keys() == whole.keys() and float(apart / scale) < 1e-5


@pytest.mark.parametrize("size", [1, 2, 4])
def test_micro_batches_add_up(tmp_path: Path, whole: dict[str, torch.Tensor], size: int) -> None:
    assert_same(worker.gradients(tmp_path, micro_batch=size), whole)


def test_gradient_checkpointing_changes_no_gradient(tmp_path: Path, whole: dict[str, torch.Tensor]) -> None:
    assert_same(worker.gradients(tmp_path, gradient_checkpointing=True), whole)


def test_out_of_memory_halves_the_micro_batch_and_keeps_the_step(
    tmp_path: Path, whole: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """More than two documents do not fit; the gradient is that of all five."""
    real = Targets.weighted_losses

    def small(self: Any, model: Any, source: Any, batch: Any, *given: Any, **named: Any) -> Any:
        if len(batch) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 PiB")
        return real(self, model, source, batch, *given, **named)

    monkeypatch.setattr(Targets, "weighted_losses", small)
    assert_same(worker.gradients(tmp_path), whole)
    assert "train.sources.0 continues with 2 documents" in caplog.text
    assert "train.sources.1 continues with 1 documents" in caplog.text


def test_one_document_that_does_not_fit_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Targets, "weighted_losses", never)
    with pytest.raises(RunError, match="Out of memory with one document"):
        worker.gradients(tmp_path)


def test_other_errors_are_not_taken_for_lack_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any, **__: Any) -> Any:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(Targets, "weighted_losses", wrong)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        worker.gradients(tmp_path)


def test_documents_of_a_length_go_together() -> None:
    """Fewer padded tokens than in the order they came in, and every document once."""
    source = Source.model_validate({"task": "sentence", "rows": 12, "weights": {"lm": 1.0}})
    documents = step_documents(source, 0, 0, 0)
    parts = split_step([source], [documents], {0: 3}, pico_tokenizer(), Accelerator(cpu=True))
    apart = [encode(documents[i : i + 3], pico_tokenizer()) for i in range(0, 12, 3)]
    assert sum(part.batch.input_ids.numel() for part in parts) < sum(batch.input_ids.numel() for batch in apart)

    def texts(batches: list[EncodedBatch]) -> list[tuple[int, ...]]:
        rows = [row for b in batches for row in zip(b.input_ids, b.attention_mask.bool(), strict=True)]
        return sorted(tuple(ids[mask].tolist()) for ids, mask in rows)

    assert texts([part.batch for part in parts]) == texts(apart)


def found_in_prompts(tmp_path: Path, prompts: list[str], span: str | None = "auto") -> tuple[Source, list[Any]]:
    """A source with these prompts, all with the answer 7, and its documents."""
    rows = [{"prompt": prompt, "answer": "7", "answer_span": [2, 3]} for prompt in prompts]
    for row in rows if span == "auto" else ():
        del row["answer_span"]
    path = tmp_path / f"{span}{len(prompts)}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
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
    parts = with_counts(
        [source], split_step([source], [documents], {0: None}, tokenizer, accelerator), True, accelerator
    )
    losses = Targets(grafts=(graft,)).weighted_losses(hybrid, source, parts[0].batch, parts[0].counts)
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
    with pytest.raises(RunError, match=r"train\.sources\.0\.weights\.attention.*Set the weight to 0"):
        losses_of(source, bare)
