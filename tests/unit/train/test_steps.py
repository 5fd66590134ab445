"""Checkpoints of whole and of sharded weights, in a world of one process: round trips, refusals, full disks."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.fsdp import fully_shard

from surgery.errors import RunError
from surgery.train.sharded import full, is_sharded
from surgery.train.steps import checkpoints, load_step, save_step

OF = {"of": "this", "history": []}


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["whole", "sharded"])
def sharded(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "sharded")


class Training:
    """Two linear layers, of which the first is frozen, and AdamW."""

    def __init__(self, sharded: bool, seed: int = 0, width: int = 5) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 3))
        self.model[0].requires_grad_(False)
        if sharded:
            fully_shard(self.model[1])
            fully_shard(self.model)
        assert is_sharded(self.model) == sharded
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer, self.accelerator = torch.optim.AdamW(trained, lr=0.1), Accelerator(cpu=True)

    def step(self) -> None:
        self.model(torch.arange(8.0).view(2, 4)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path, step: int = 1) -> None:
        save_step(folder, self.model, self.optimizer, step, OF, self.accelerator)

    def load(self, folder: Path, of: str = "this") -> dict[str, Any] | None:
        return load_step(folder, self.model, self.optimizer, of, self.accelerator)

    def weights(self) -> list[torch.Tensor]:
        return [full(p.detach()).clone() for p in self.model.parameters()]


def assert_same(found: Training, expected: Training) -> None:
    for mine, other in zip(found.weights(), expected.weights(), strict=True):
        assert torch.equal(mine, other)


def test_what_is_loaded_goes_on_as_what_was_saved(sharded: bool, tmp_path: Path) -> None:
    saved, loaded = Training(sharded), Training(sharded, seed=1)
    saved.step()
    saved.save(tmp_path)
    assert loaded.load(tmp_path) == {"step": 1, **OF}
    assert_same(loaded, saved)
    for training in (saved, loaded):
        training.step()
    assert_same(loaded, saved)


def test_before_the_first_step_there_are_no_moments(sharded: bool, tmp_path: Path) -> None:
    saved, loaded = Training(sharded), Training(sharded, seed=1)
    saved.save(tmp_path, step=0)
    loaded.load(tmp_path)
    assert not loaded.optimizer.state
    for training in (saved, loaded):
        training.step()
    assert_same(loaded, saved)


def test_the_newest_is_kept_and_nothing_else(sharded: bool, tmp_path: Path) -> None:
    training = Training(sharded)
    for step in (1, 2):
        training.step()
        training.save(tmp_path, step)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000002"]
    names = {"shards"} if sharded else {"model.safetensors", "optimizer.pt"}
    assert {p.name for p in (tmp_path / "step_000002").iterdir()} == names | {"state.json"}


def test_none_to_load(sharded: bool, tmp_path: Path) -> None:
    assert Training(sharded).load(tmp_path / "missing") is None


def test_the_other_kind_is_refused(sharded: bool, tmp_path: Path) -> None:
    Training(sharded).save(tmp_path)
    with pytest.raises(RunError, match=f"Its weights are {'sharded' if sharded else 'whole'}, those of this launch"):
        Training(not sharded).load(tmp_path)


def test_another_training_is_refused(sharded: bool, tmp_path: Path) -> None:
    Training(sharded).save(tmp_path)
    with pytest.raises(RunError, match="It belongs to another training"):
        Training(sharded).load(tmp_path, of="that")


def test_other_weights_are_refused(sharded: bool, tmp_path: Path) -> None:
    Training(sharded).save(tmp_path)
    other = Training(sharded)
    other.model.append(nn.Linear(3, 3))
    with pytest.raises(RunError, match=r"It has other weights: 2\.bias and 1 more"):
        other.load(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_the_last_one(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(sharded=True)
    training.save(tmp_path)
    _failing(monkeypatch, OSError(number, "full"))
    with pytest.raises(RunError, match=r"The disk is full\. step_000001 is kept"):
        training.save(tmp_path, step=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]


def test_any_other_failure_is_shown_and_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(sharded=True)
    training.save(tmp_path)
    _failing(monkeypatch, ValueError("broken"))
    with pytest.raises(CheckpointException, match="broken"):
        training.save(tmp_path, step=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]


def _failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Some shards are written, then one process fails; every process hears of it, as here."""

    def save(tensors: Any, checkpoint_id: Path) -> None:
        checkpoint_id.mkdir()
        (checkpoint_id / "__0_0.distcp").write_text("half")
        raise CheckpointException("write", {1: (error, None)})  # type: ignore[dict-item]

    monkeypatch.setattr(dcp, "save", save)


def test_what_a_kill_left_is_swept(sharded: bool, tmp_path: Path) -> None:
    training = Training(sharded)
    training.save(tmp_path)
    half = tmp_path / ".step_000002.77.tmp" / "shards"
    half.mkdir(parents=True)
    (half / "__0_0.distcp").write_text("half")
    state = training.load(tmp_path)
    assert state is not None and state["step"] == 1
    assert checkpoints(tmp_path) == list(tmp_path.iterdir())
    assert json.loads((tmp_path / "step_000001" / "state.json").read_text())["of"] == "this"
