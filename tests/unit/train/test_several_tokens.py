"""Training on answers of several tokens: every token has its read, however a step is cut up or packed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from surgery.data.encoding import EncodedBatch, encode
from surgery.data.user import read_documents
from surgery.models.lookup import family_of
from surgery.probes.documents import Document, Question
from surgery.recipe import Data, Train
from surgery.recipe.objectives import OBJECTIVES
from surgery.train import trainer as module
from surgery.train.targets import Targets
from surgery.train.teacher import Teacher
from surgery.train.trainer import StageTrainer
from surgery.types import Graft
from tests.support.kernels import with_kernels
from tests.support.pico import pico_base, pico_family, pico_hybrid, pico_site, pico_tokenizer
from tests.support.stage_run import record_gradients

SHAPE: dict[str, Any] = {"vocab_size": 1024, "layers": 2}
ONE, SEVERAL = ("4", "71", "9", "38", "5"), ("4", "7125", "91230456", "381", "the old baker")
WEIGHTS: tuple[dict[str, float], ...] = ({"answer": 1.0, "attention": 0.5}, {"attention_kl": 1.0, "lm": 0.1})


def data_of(folder: Path, answers: tuple[str, ...]) -> Data:
    """A line of the user's data for each answer; the first is much longer than the others."""
    rows = []
    for i, answer in enumerate(answers):
        prompt = "red:90\n" * (9 if i == 0 else 1) + "blue:"
        span = [len(prompt), len(prompt) + len(answer)]
        rows.append({"prompt": f"{prompt}{answer}\nblue is", "answer": answer, "span": span})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Data.model_validate({"path": str(path), "columns": {"answer_span": "span"}})


def stage(
    folder: Path,
    weights: dict[str, float],
    answers: tuple[str, ...] = SEVERAL,
    kind: type[Targets] = Targets,
    **more: Any,
) -> StageTrainer:
    source = {"data": data_of(folder, answers).model_dump(), "rows": len(answers), "weights": weights}
    teaches = {"teacher": {"model": "x"}} if "attention_kl" in weights else {}
    rates = {"warmup": 1, "lr": 1e-3, "new_heads_lr": 1e-3}
    train = Train.model_validate({"steps": 1, "sources": [source], "optimizer": rates, **teaches, **more})
    model = pico_hybrid([pico_site(1)], **SHAPE)
    graft = Graft(family_of(model.config).mixers(model.config)[1], (2,), "add", "ssm", ("answer_token",))
    teacher = None
    if teaches:
        llama = pico_family("llama", vocab_size=1024, num_hidden_layers=2)
        teacher = Teacher(llama, pico_tokenizer(), model.config, (graft,), train.align, train.needs)
    targets = kind(base=pico_base(**SHAPE), grafts=(graft,), teacher=teacher)
    return StageTrainer(model, pico_tokenizer(), train, 0, Accelerator(cpu=True), targets)


def without_time(history: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in history]


def first_step(trainer: StageTrainer) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Losses and gradients."""
    gradients = record_gradients(trainer)
    (entry,) = without_time(trainer.run())
    return entry, gradients


@pytest.mark.parametrize("weights", WEIGHTS, ids="+".join)
def test_parts_and_packed_rows_have_the_losses_and_gradients_of_the_whole(
    weights: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_kernels(monkeypatch)
    losses, gradients = first_step(stage(tmp_path, weights))
    scale = torch.stack([g.norm() for g in gradients.values()]).norm()
    for more in ({"micro_batch": 1}, {"micro_batch": 2}, {"packing": True}):
        made = stage(tmp_path, weights, **more)
        found, found_gradients = first_step(made)
        assert made.packing == ("packing" in more)
        assert found == pytest.approx(losses, rel=1e-5) and found_gradients.keys() == gradients.keys(), more
        apart = torch.stack([(found_gradients[name] - g).norm() for name, g in gradients.items()]).norm()
        assert float(scale) > 0 and float(apart / scale) < 1e-5, more


class FirstTokens(Targets):
    """Sees the first token of each answer alone, as if the batch had no reads."""

    def weighted_losses(self, model: Any, sources: Any, batch: EncodedBatch, *given: Any) -> Any:
        first = replace(batch, read_query=None, read_segment_end=None, read_answer_token=None)
        return super().weighted_losses(model, sources, first, *given)


def test_answers_of_one_token_train_the_same_weights_bit_for_bit(tmp_path: Path) -> None:
    """As if only first tokens were supervised; with several tokens that is another training."""
    for weights in WEIGHTS:
        for answers, same in ((ONE, True), (SEVERAL, False)):
            made = [stage(tmp_path, weights, answers, kind, steps=1) for kind in (Targets, FirstTokens)]
            histories = [without_time(trainer.run()) for trainer in made]
            assert (histories[0] == histories[1]) == same
            pairs = zip(*(trainer.model.state_dict().values() for trainer in made), strict=True)
            assert all(torch.equal(*pair) for pair in pairs) == same


def test_every_token_but_the_end_is_a_term(tmp_path: Path) -> None:
    documents, _ = read_documents(data_of(tmp_path, SEVERAL), pico_tokenizer())
    batch = encode(documents, pico_tokenizer())
    tokens = sum(len(pico_tokenizer().encode(a, add_special_tokens=False)) for a in SEVERAL)
    found = {name: OBJECTIVES[name].count(batch) for name in ("attention", "attention_kl", "answer")}
    assert tokens >= len(SEVERAL) + 5
    assert found == {"attention": tokens, "attention_kl": tokens, "answer": tokens + len(SEVERAL)}


@pytest.mark.parametrize(("value", "missing"), [("712", 0), ("seven", 1)])
def test_answer_tokens_without_a_place_are_logged(
    value: str, missing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompt, answer = f"blue:{value}\nblue is", "712"
    question = Question((len(prompt), len(prompt) + 3), (), -1, (0, 6 + len(value)), (5, 5 + len(value)))
    document = Document("made_up", prompt + answer, (question,))
    monkeypatch.setattr(module, "open_source", lambda *_: SimpleNamespace(step=lambda _: [document] * 3))
    number = len(pico_tokenizer().encode(answer, add_special_tokens=False))
    stage(tmp_path, {"attention": 1.0}).run()
    text = f"train.sources.0: no token of the segment holds {3 * (number - 1)} of {3 * number} answer tokens"
    assert number > 1 and (text in caplog.text) == bool(missing)
