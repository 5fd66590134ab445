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
from surgery.testing.pico import pico_base, pico_hybrid, pico_site, pico_tokenizer
from surgery.train.micro_batches import MicroBatch, join, shrink, split_step, with_counts
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


SHORT: tuple[dict[str, Any], ...] = (
    {"task": "sentence", "rows": 5, "weights": {"base_kl": 1.0}},
    {"task": "closed_book", "rows": 3, "weights": {"base_kl": [0.5, 2.0]}},
    {"task": "sentence", "rows": 4, "weights": {"lm": 1.0}},
)
LONG = {"task": "kv_retrieval", "pairs": [20, 20], "rows": 2, "weights": {"answer": 1.0}}


def parts_of(
    *sources: dict[str, Any], sizes: dict[int, int | None] | None = None
) -> tuple[list[MicroBatch], dict[int, int | None]]:
    """Micro-batches of one step of these sources, with counts."""
    checked = [Source.model_validate(source) for source in sources]
    documents = [step_documents(source, 0, index, 0) for index, source in enumerate(checked)]
    sizes = {**dict.fromkeys(range(len(checked))), **(sizes or {})}
    accelerator = Accelerator(cpu=True)
    parts = split_step(checked, documents, sizes, pico_tokenizer(), accelerator)
    return with_counts(checked, parts, False, accelerator), sizes


def indices(groups: list[list[MicroBatch]]) -> list[list[int]]:
    return [sorted(part.index for part in group) for group in groups]


def test_short_texts_of_several_sources_take_one_pass() -> None:
    accelerator = Accelerator(cpu=True)
    assert indices(join(*parts_of(LONG, *SHORT), accelerator)) == [[0], [1, 2, 3]]
    assert indices(join(*parts_of(LONG, *SHORT, sizes={2: 1}), accelerator))[-1] == [1, 3], "micro_batch is set"
    longer = {**SHORT[0], "task": "kv_retrieval", "pairs": [12, 12]}
    assert indices(join(*parts_of(LONG, SHORT[0], longer), accelerator)) == [[0], [1], [2]], "too much padding"
    for group in join(*parts_of(*SHORT), accelerator):  # without a longer source, none may grow
        assert len(group) == 1


def test_a_joined_pass_that_does_not_fit_is_run_apart() -> None:
    parts, sizes = parts_of(LONG, *SHORT)
    accelerator = Accelerator(cpu=True)
    shrink(sizes, join(parts, sizes, accelerator)[1], 0, accelerator)
    assert sizes == {0: None, 1: 5, 2: 3, 3: 4}, "whole, so the next step has the same micro-batches"
    assert indices(join(parts, sizes, accelerator)) == [[0], [1], [2], [3]]


def test_a_joined_pass_has_the_losses_and_gradients_of_separate_ones() -> None:
    parts, sizes = parts_of(LONG, *SHORT)
    base, model = (pico_base(seed, vocab_size=1024, layers=2) for seed in (1, 0))
    targets = Targets(base=base)
    found = []
    for groups in (join(parts, sizes, Accelerator(cpu=True)), [[part] for part in parts]):
        losses: dict[str, float] = {}
        model.zero_grad()
        for group in groups:
            found_here = (
                targets.joined_losses(model, group, 0.25)
                if len(group) > 1
                else targets.weighted_losses(model, group[0].source, group[0].batch, group[0].counts, 0.25)
            )
            for name, loss in found_here.items():
                loss.backward(retain_graph=True)
                losses[name] = losses.get(name, 0.0) + float(loss.detach())
        found.append((losses, [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    (joined, joined_gradients), (apart, gradients) = found
    assert joined.keys() == apart.keys() == {"answer", "base_kl", "lm"}
    assert all(joined[name] == pytest.approx(apart[name], rel=1e-4) for name in apart)
    for one, other in zip(joined_gradients, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


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
