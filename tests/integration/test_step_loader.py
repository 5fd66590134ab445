"""Steps that are prepared ahead by worker processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from surgery.errors import DataError, RunError
from surgery.recipe import Train
from surgery.train.step_loader import steps_of
from surgery.train.training import train_model
from tests.support.pico import pico_base, pico_tokenizer


@dataclass(frozen=True)
class Prepared:
    """Makes the number of the step, unless something fails at `fails`."""

    fails: int = -1
    killed: bool = False

    def __call__(self, step: int) -> torch.Tensor:
        if step == self.fails and self.killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == self.fails:
            raise DataError("rows.jsonl, line 3", "no JSON", "Remove the line.")
        return torch.tensor([step, torch.get_num_threads()])


def test_steps_come_in_order_from_any_start_and_a_worker_computes_on_one_thread() -> None:
    for workers in (0, 2):
        numbers, threads = zip(*(step.tolist() for step in steps_of(Prepared(), range(3, 8), workers)), strict=True)
        assert numbers == (3, 4, 5, 6, 7) and (not workers or set(threads) == {1})
    assert list(steps_of(Prepared(), range(5, 5), 2)) == []


def test_an_error_of_the_data_keeps_its_words() -> None:
    steps = steps_of(Prepared(fails=1), range(3), 1)
    next(steps)
    with pytest.raises(DataError, match=r"^rows\.jsonl, line 3: no JSON\. Remove the line\.$"):
        next(steps)


def test_a_killed_worker_gives_one_error_that_names_the_setting() -> None:
    with pytest.raises(RunError, match=r"train\.workers: 1\. A process .* was killed"):
        list(steps_of(Prepared(fails=0, killed=True), range(2), 1))


def test_closing_ends_the_workers() -> None:
    steps = steps_of(Prepared(), range(100), 1)
    next(steps)
    assert multiprocessing.active_children()
    steps.close()  # type: ignore[attr-defined]
    assert not multiprocessing.active_children()


def test_a_training_is_the_same_with_any_number_of_workers(tmp_path: Path) -> None:
    """Weights and history bit for bit, also where a resumed run has another number."""
    rates = {"warmup": 1}
    sources = [
        {"task": "kv_retrieval", "pairs": (2, 4), "rows": 3, "weights": {"answer": 1.0}},
        {"task": "sentence", "rows": 4, "weights": {"lm": 1.0}},
    ]
    found = []
    for workers, resumed in ((0, None), (2, None), (0, 1)):
        model, folder = pico_base(vocab_size=1024, layers=1), tmp_path / f"{workers}{resumed}"
        section = Train.model_validate(
            {"steps": 4, "save_every": 2, "workers": workers, "sources": sources, "optimizer": rates, "packing": True}
        )
        if resumed is not None:
            with pytest.raises(InterruptedError):
                train_model(model, pico_tokenizer(), section, folder=folder, on_step=stop_after_three)
            section = section.model_copy(update={"workers": resumed})
            model = pico_base(vocab_size=1024, layers=1)
        history = train_model(model, pico_tokenizer(), section, folder=folder)
        losses = [{k: v for k, v in entry.items() if k != "seconds"} for entry in history]
        found.append((losses, model.state_dict()))
    for losses, weights in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(weights[name], value) for name, value in found[0][1].items())


def stop_after_three(step: int, _: object) -> None:
    if step == 3:
        raise InterruptedError
