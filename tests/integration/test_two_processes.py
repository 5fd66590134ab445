"""Two real processes (gloo) train as one does: the same gradients, losses and weights; what was stopped goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from surgery.train.checkpoints import checkpoints
from tests.support import training_worker as worker
from tests.support.kernels import with_kernels


def test_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    """Answers of different lengths on each: a mean of the processes' means would be another gradient."""
    two, one = worker.launch(tmp_path, "gradients"), worker.gradients(tmp_path)
    assert two.keys() == one.keys() and len(one) > 20
    scale = torch.stack([g.norm() for g in one.values()]).norm()
    apart = torch.stack([(two[name] - g).norm() for name, g in one.items()]).norm()
    assert float(apart / scale) < 1e-6


@pytest.mark.parametrize("case", ["packed", "sharded packed"])
def test_packed_documents_are_those_of_one_process_in_padded_rows(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under DDP and under FSDP2, with kernels in plain torch."""
    with_kernels(monkeypatch)
    sources = [worker.uneven(tmp_path)]
    one, two = worker.gradients(tmp_path, sources=sources), worker.launch(tmp_path, case)
    scale = torch.stack([g.norm() for g in one.values()]).norm()
    apart = torch.stack([(two[name] - g).norm() for name, g in one.items()]).norm()
    assert two.keys() == one.keys() and 0 < float(apart / scale) < 1e-5


def test_losses_are_those_of_one_process_up_to_the_same_plateau(tmp_path: Path) -> None:
    two, one = worker.launch(tmp_path, "losses"), worker.losses(tmp_path)
    assert any("last_step" in step for step in one) and len(one) < 9
    for name, values in two.items():
        assert values.tolist() == pytest.approx([step[name] for step in one], rel=1e-4), name


def test_weights_are_those_of_one_process_and_a_stopped_run_goes_on(tmp_path: Path) -> None:
    """Five AdamW steps in fp64: rounding in near-zero gradients is all that Adam could make large."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one = worker.weights(tmp_path / "one", 5)
    worker.launch(tmp_path / "two", "stop", code=1)
    assert [p.name for p in checkpoints(tmp_path / "two" / "steps")] == ["step_000002"]
    two = worker.launch(tmp_path / "two", "weights")
    shutil.rmtree(tmp_path / "two" / "steps")
    for name, weight in one.items():
        assert float((two[name] - weight).abs().max()) < 1e-7, name
