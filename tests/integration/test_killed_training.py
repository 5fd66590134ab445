"""Killed at any moment, in a step or in a save, a training ends with the weights of one that was not."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from surgery.train import checkpoints as steps
from surgery.train.checkpoints import checkpoints
from tests.support import training_worker as worker

STEPS, KILLS = 8, 5
FORK = multiprocessing.get_context("fork")


def train(folder: Path, kill_in_save: int | None) -> None:
    """In a process of its own; `kill_in_save`: at that call among those that a save makes."""
    torch.set_num_threads(1)
    if kill_in_save is not None:
        calls = 0

        def dying(real: Any) -> Any:
            def call(*given: Any, **named: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == kill_in_save:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*given, **named)

            return call

        steps.save_file, steps.torch.save = dying(save_file), dying(torch.save)
        os.rename, steps.json.dumps, shutil.rmtree = dying(os.rename), dying(json.dumps), dying(shutil.rmtree)
    found = worker.weights(folder, STEPS, double=False, save_every=1)
    save_file(found, folder / "out.safetensors")


def run(folder: Path, kill_in_save: int | None = None, after: float | None = None) -> int:
    """Exit code of a training; `after` so many seconds it is killed."""
    process = FORK.Process(target=train, args=(folder, kill_in_save))
    process.start()
    process.join(after)
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        process.join()
    assert process.exitcode is not None
    return process.exitcode


def assert_whole(folder: Path) -> None:
    """Every checkpoint there is can be loaded."""
    for step in checkpoints(folder / "steps"):
        assert load_file(step / "model.safetensors") and json.loads((step / "state.json").read_text())["step"] > 0
        assert torch.load(step / "optimizer.pt", weights_only=True)["state"]


@pytest.mark.parametrize("where", ["step", "save"])
def test_killed_again_and_again(tmp_path: Path, where: str) -> None:
    (tmp_path / "whole").mkdir()
    began = time.perf_counter()
    assert run(tmp_path / "whole") == 0
    took = time.perf_counter() - began
    rng, folder, killed = random.Random(where), tmp_path / "killed", 0
    folder.mkdir()
    for _ in range(6 * KILLS):
        if killed == KILLS:
            break
        if where == "save":
            code = run(folder, kill_in_save=rng.randint(1, 12))
        else:
            code = run(folder, after=rng.uniform(0.3, 0.7) * took)
        killed += code == -signal.SIGKILL
        assert code in (0, -signal.SIGKILL)
        assert_whole(folder)
        if code == 0:  # it was over before it could be killed
            shutil.rmtree(folder / "steps")
    assert killed == KILLS
    assert run(folder) == 0
    expected, found = (load_file(tmp_path / name / "out.safetensors") for name in ("whole", "killed"))
    assert expected.keys() == found.keys()
    assert [name for name, weight in expected.items() if not torch.equal(weight, found[name])] == []
    assert all(not p.name.startswith(".") for p in (folder / "steps").iterdir()), "nothing half-written is left"
