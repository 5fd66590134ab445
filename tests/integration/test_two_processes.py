"""Two real processes (gloo) train as one does: the same gradients, losses and weights; what was stopped goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from surgery.train.steps import checkpoints
from tests.integration import training_worker as worker

ROOT = Path(__file__).parents[2]


def launch(folder: Path, case: str, code: int = 0) -> dict[str, Tensor]:
    """What rank 0 of two processes found."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, "-m", "tests.integration.training_worker", str(folder), case]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    assert (done.returncode != 0) == bool(code), done.stderr[-3000:]
    if code:
        return {}
    found = load_file(folder / "out.safetensors")
    assert int(found.pop("world")) == 2
    return found


def test_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    """Answers of different lengths on each: a mean of the processes' means would be another gradient."""
    two, one = launch(tmp_path, "gradients"), worker.gradients(tmp_path)
    assert two.keys() == one.keys() and len(one) > 20
    scale = torch.stack([g.norm() for g in one.values()]).norm()
    apart = torch.stack([(two[name] - g).norm() for name, g in one.items()]).norm()
    assert float(apart / scale) < 1e-6


def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    two, one = launch(tmp_path, "losses"), worker.losses(tmp_path)
    for name, values in two.items():
        assert values.tolist() == pytest.approx([step[name] for step in one], rel=1e-4), name


def test_weights_are_those_of_one_process_and_a_stopped_run_goes_on(tmp_path: Path) -> None:
    """Five AdamW steps in fp64: rounding in near-zero gradients is all that Adam could make large."""
    one = worker.weights(tmp_path / "one" if (tmp_path / "one").mkdir() is None else tmp_path, 5)
    (tmp_path / "two").mkdir()
    launch(tmp_path / "two", "stop", code=1)
    assert [p.name for p in checkpoints(tmp_path / "two" / "steps")] == ["step_000002"]
    two = launch(tmp_path / "two", "weights")
    shutil.rmtree(tmp_path / "two" / "steps")
    for name, weight in one.items():
        assert float((two[name] - weight).abs().max()) < 1e-9, name
