"""Steps that are prepared in this process. tests/integration/test_step_loader.py has those of workers."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from surgery.data.user import open_source
from surgery.errors import DataError, RunError
from surgery.recipe import Source, Train
from surgery.testing.pico import pico_tokenizer
from surgery.train.resuming import identities_of
from surgery.train.step_loader import steps_of, workers_by_default


def test_steps_are_prepared_when_they_are_needed() -> None:
    prepared: list[int] = []
    steps = steps_of(lambda step: prepared.append(step) or step, range(3, 6))
    assert prepared == []
    assert next(steps) == 3 and prepared == [3]
    assert list(steps) == [4, 5]


def test_an_error_of_the_data_passes_unchanged() -> None:
    def prepare(step: int) -> int:
        raise DataError("rows.jsonl, line 3", "no JSON", "Remove the line.")

    with pytest.raises(DataError, match="line 3: no JSON"):
        next(steps_of(prepare, range(2)))


def test_what_does_not_pickle_is_refused() -> None:
    with pytest.raises(RunError, match=r"train\.workers: 1\. .* Set it to 0"):
        next(steps_of(lambda step: step, range(2), 1))


def test_no_workers_by_default_on_a_cpu() -> None:
    assert workers_by_default("cpu") == 0
    assert 0 <= workers_by_default("cuda", 1) <= 8
    assert workers_by_default("cuda", 10**6) == 0


def test_another_number_of_workers_is_the_same_training() -> None:
    import torch

    one, other = (Train.model_validate({"steps": 1, "workers": workers}) for workers in (None, 3))
    model = torch.nn.Linear(1, 1)
    assert identities_of(model, one, 0, 0) == identities_of(model, other, 0, 0)


@pytest.mark.parametrize("streaming", [None, False, True])
def test_streams_give_the_same_steps_in_another_process(streaming: bool | None, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"The letter {i}"}) + "\n" for i in range(20)))
    source: dict = {"rows": 3, "weights": {"lm": 1.0}, "task": "kv_retrieval", "pairs": (2, 4)}
    if streaming is not None:
        data = {"path": str(path), "columns": {"text": "text"}, "streaming": streaming}
        source = {"rows": 3, "weights": {"lm": 1.0}, "data": data}
    stream = open_source(Source.model_validate(source), pico_tokenizer(), 0, 0)
    stream.step(4)
    sent = pickle.loads(pickle.dumps(stream))  # noqa: S301
    assert [sent.step(step) for step in (1, 9, 3)] == [stream.step(step) for step in (1, 9, 3)]
