"""The time of a stage that was interrupted and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from surgery.data.user import open_source
from surgery.models.lookup import family_of, geometry_of
from surgery.recipe import Recipe, check_recipe
from surgery.report.figures import curves
from surgery.report.progress_lines import ProgressLines
from surgery.run import pipeline
from surgery.run.context import Run
from surgery.run.stage import Stage
from surgery.run.train_stages import ControlStage, TrainStage
from surgery.train import trainer
from surgery.train.training import make_accelerator
from surgery.types import Graft, Plan
from tests.support.pico import pico_base, pico_config, pico_hybrid, pico_site, pico_tokenizer

SOURCE = {"task": "kv_retrieval", "pairs": 2, "questions": 1, "rows": 1, "weights": {"answer": 1.0}}
LOAD, STEP = 100.0, 10.0  # seconds on the clock of the tests
SHAPE: dict[str, Any] = {"vocab_size": len(pico_tokenizer()), "layers": 1}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that only loading a model and a step of training move."""
    clock, gradients = Clock(), trainer.StageTrainer._gradients
    config = pico_base(**SHAPE).config
    graft = Graft(family_of(config).mixers(config)[0], (2,), "add", "ssm", ("segment_end",))

    def step(*given: Any) -> Any:
        clock.now += STEP
        return gradients(*given)

    def loading(make: Callable[[], Any]) -> Callable[[Run], Any]:
        def load(_: Run) -> Any:
            clock.now += LOAD
            return make()

        return load

    monkeypatch.setattr("time.perf_counter", clock)
    monkeypatch.setattr(trainer.StageTrainer, "_gradients", step)
    monkeypatch.setattr(Run, "untrained", loading(lambda: pico_hybrid([pico_site(0)], **SHAPE)))
    monkeypatch.setattr(Run, "untrained_control", loading(lambda: pico_base(**SHAPE)))
    monkeypatch.setattr(Run, "plan", lambda _: Plan("base", geometry_of(config), (graft,), 0))
    monkeypatch.setattr(Run, "save", lambda *_: None)
    monkeypatch.setattr(curves, "training_curve", lambda *_: None)
    return clock


class StopsAfter(ProgressLines):
    """Interrupts the training after a step, as Ctrl-C does."""

    def __init__(self, step: int | None) -> None:
        super().__init__()
        self.step, self.seconds = step, 0.0

    def progress(self, done: int, total: int, note: str = "") -> None:
        if done == self.step:
            raise KeyboardInterrupt

    def finish(self, stage: str, seconds: float) -> None:
        self.seconds = seconds


def session(folder: Path, name: str, after: int | None = None) -> tuple[float, float]:
    """Run a stage in a session of its own, interrupted after a step.

    Returns:
        The seconds in the manifest, and those of the session for the reporter; 0 if it was interrupted.
    """
    train = {"save_every": 1, "steps": 4, "sources": [SOURCE]}
    data = {"name": "t", "base": {"model": "m"}, "locate": {"pairs": 2}, "train": train}
    run = Run(check_recipe(data, Recipe), folder, make_accelerator(), StopsAfter(after))
    run.__dict__.update(revision="r", base_size=1000, _tokenizer=pico_tokenizer())
    stage: Stage = {"train": TrainStage, "control": ControlStage}[name]()
    stage.reads = ()
    with pytest.raises(KeyboardInterrupt) if after is not None else nullcontext():
        pipeline.run_stage(run, stage, forced=False)
    manifest = run.rundir.manifest(name) or {"seconds": 0.0}
    return manifest["seconds"], run.reporter.seconds  # type: ignore[attr-defined]


def test_every_step_counts_once_in_the_seconds_of_a_resumed_training(tmp_path: Path, clock: Clock) -> None:
    """A step that no checkpoint has is trained again. Loading counts for the session alone."""
    for name, interrupted, steps in (("train", (), 4), ("control", (3,), 2), ("train", (2, 3), 2)):
        folder = tmp_path / f"{name}{interrupted}"
        for after in interrupted:
            assert session(folder, name, after) == (0, 0)
        assert session(folder, name) == (LOAD + 4 * STEP, LOAD + steps * STEP), (name, interrupted)


def test_skipped_rows_are_reported_and_data_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": "a 42 b\n", "answer": "42"}, {"prompt": "", "answer": "7"}, {"prompt": "c 7 d\n", "answer": ""}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    own = {"path": str(path), "on_bad_row": "skip", "holdout": 0, "columns": {"answer_span": "auto"}}
    source = {"data": own, "rows": 1, "weights": {"answer": 1.0, "attention": 1.0}}
    notes: list[str] = []

    class Notes(ProgressLines):
        def note(self, topic: str, text: str) -> None:
            notes.append(f"{topic} {text}")

    counted = Mock(wraps=open_source)
    monkeypatch.setattr("surgery.run.train_stages.open_source", counted)
    for read_steps in (None, 1):
        counted.reset_mock()
        train = {"steps": 1, "read_steps": read_steps, "sources": [source, source]}
        data = {"name": "t", "base": {"model": "m"}, "train": train}
        run = Run(check_recipe(data, Recipe), tmp_path / "run", make_accelerator(), Notes())
        run.__dict__.update(_tokenizer=pico_tokenizer(), config=pico_config(vocab_size=len(pico_tokenizer())))
        TrainStage().check_data(run)
        assert counted.call_count == 1
        note = notes.pop()
        assert note.startswith("data rows.jsonl: 2 rows cannot be used and are skipped. The first: ") and ":2: " in note
        assert not notes
