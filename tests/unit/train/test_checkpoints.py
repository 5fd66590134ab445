"""Checkpoints of whole and of sharded weights, in a world of one process: round trips, refusals, full disks."""

from __future__ import annotations

import errno
import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from surgery.errors import RunError
from surgery.recipe import Train
from surgery.train import checkpoints as module
from surgery.train.checkpoints import checkpoints, fault_of, identity_of, load_checkpoint, save_checkpoint
from surgery.train.sharded import full

OF = {"of": "this", "history": []}
KINDS = (False, True)  # whole and sharded


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Training:
    """Two linear layers, of which the first is frozen, and AdamW."""

    def __init__(self, sharded: bool = False, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
        self.model[0].requires_grad_(False)
        if sharded:
            fully_shard(self.model[1])
            fully_shard(self.model)
        assert all(isinstance(p, DTensor) == sharded for p in self.model.parameters())
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer, self.accelerator = torch.optim.AdamW(trained, lr=0.1), Accelerator(cpu=True)

    def step(self) -> None:
        self.model(torch.arange(8.0).view(2, 4)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path, step: int = 1) -> None:
        save_checkpoint(folder, self.model, self.optimizer, step, OF, self.accelerator)

    def load(self, folder: Path, of: str = "this") -> dict[str, Any] | None:
        return load_checkpoint(folder, self.model, self.optimizer, of, self.accelerator)

    def weights(self) -> list[torch.Tensor]:
        return [full(p.detach()).clone() for p in self.model.parameters()]


def assert_same(found: Training, expected: Training) -> None:
    for mine, other in zip(found.weights(), expected.weights(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("steps", [0, 1])
def test_what_is_loaded_goes_on_as_what_was_saved(steps: int, tmp_path: Path) -> None:
    """Before the first step, when there are no moments, and after it; sharded or whole, and the one from the other."""
    for saving in KINDS:
        for loading in KINDS:
            saved, loaded = Training(saving), Training(loading, seed=1)
            for _ in range(steps):
                saved.step()
            folder = tmp_path / f"{saving}{loading}"
            saved.save(folder)
            assert {p.name for p in (folder / "step_000001").iterdir()} == {
                "model.safetensors",
                "optimizer.pt",
                "state.json",
            }
            assert loaded.load(folder) == {"step": 1, **OF}
            shutil.rmtree(folder)
            assert_same(loaded, saved)
            if loading == saving:  # bit for bit only where the same kernels run
                for training in (saved, loaded):
                    training.step()
                assert_same(loaded, saved)


def test_the_two_newest_are_kept_and_nothing_else(tmp_path: Path) -> None:
    training = Training()
    for step in (1, 2, 999_999, 1_000_000):
        training.save(tmp_path, step)
    (tmp_path / "step_x").mkdir()
    assert [p.name for p in checkpoints(tmp_path)] == ["step_999999", "step_1000000"]
    assert (Training().load(tmp_path) or {})["step"] == 1_000_000
    assert checkpoints(tmp_path / "missing") == [] and Training().load(tmp_path / "missing") is None


def damages(step: Path) -> Iterator[tuple[Path, bytes | None]]:
    """Every file of a checkpoint: gone, cut at several places, or of another type."""
    for path in sorted(p for p in step.rglob("*") if p.is_file()):
        data = path.read_bytes()
        yield path, None
        for size in sorted({0, 1, 8, len(data) // 2, len(data) - 1}):
            yield path, data[:size]
        yield path, bytes(len(data))  # as some file systems leave one that was not synced
        yield path, pickle.dumps([1, 2])
    state = json.loads((step / "state.json").read_text())
    for broken in ([], None, {}, {**state, "step": "2"}, {**state, "step": 7}):
        yield step / "state.json", json.dumps(broken).encode()
    yield step / "state.json", b"[" * 100_000
    yield step / "state.json", b'{"of": "\xff"}'


def test_one_that_was_cut_short_is_set_aside_and_the_one_before_it_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = Training()
    saved.step()
    saved.save(tmp_path / "whole", 1)
    first = saved.weights()
    saved.step()
    saved.save(tmp_path / "whole", 2)
    found = list(damages(tmp_path / "whole" / "step_000002"))
    assert len(found) > 25
    for number, (path, data) in enumerate(found):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", folder)
        target = folder / path.relative_to(tmp_path / "whole")
        target.unlink() if data is None else target.write_bytes(data)
        caplog.clear()
        loaded = Training(seed=1)
        state = loaded.load(folder)
        what = f"{path.name} with {data[:20] if data is not None else None!r}"
        assert state is not None and state["step"] == 1, what
        assert all(torch.equal(a, b) for a, b in zip(loaded.weights(), first, strict=True)), what
        assert {p.name for p in folder.iterdir()} == {"step_000001", "broken_step_000002"}, what
        (warning,) = [r.getMessage() for r in caplog.records if r.name == "surgery.train.checkpoints"]
        assert warning.endswith("renamed to broken_step_000002"), what
        loaded.step()
        loaded.save(folder, 2)  # goes on, beside what was set aside
        assert_same(loaded, saved)


class Runs:
    """A pickle that would run code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_no_pickle_of_a_checkpoint_runs_code(tmp_path: Path) -> None:
    for name in ("optimizer.pt", "model.safetensors"):
        for dump in (pickle.dump, torch.save):
            Training().save(tmp_path)
            with open(tmp_path / "step_000001" / name, "wb") as file:
                dump({"state": Runs(tmp_path / "ran"), "param_groups": []}, file)
            assert fault_of(tmp_path / "step_000001") is not None
            assert Training().load(tmp_path) is None and not (tmp_path / "ran").exists()


def test_a_full_disk_at_any_file_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other failure is shown as it is. tests/unit/files/test_atomic.py has the words of every full disk."""
    failures: list[tuple[Any, str, Exception]] = [
        (module, "save_file", SafetensorError("I/O error: No space left on device (os error 28)")),
        (torch, "save", RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 2091904 vs 2091856")),
        (json, "dumps", OSError(errno.ENOSPC, "No space left on device")),
        (torch, "save", ValueError("broken")),
    ]
    training = Training()
    training.save(tmp_path)
    for where, call, error in failures:

        def fail(*given: Any, error: Exception = error, **named: Any) -> None:
            raise error

        monkeypatch.setattr(where, call, fail)
        says = "broken" if str(error) == "broken" else r"The disk is full\. step_000001 is kept"
        with pytest.raises((RunError, ValueError), match=says):
            training.save(tmp_path, step=2)
        monkeypatch.undo()
        assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]
        assert fault_of(tmp_path / "step_000001") is None


def test_another_training_or_other_weights_are_refused(tmp_path: Path) -> None:
    Training().save(tmp_path)
    with pytest.raises(RunError, match="It belongs to another training"):
        Training().load(tmp_path, of="that")
    other = Training()
    other.model.append(nn.Linear(3, 3))
    with pytest.raises(RunError, match=r"It has other weights: 2\.bias and 1 more"):
        other.load(tmp_path)


def test_what_changes_no_weight_is_no_other_training() -> None:
    model = nn.Linear(1, 1)
    one, same, other = (
        identity_of(model, Train.model_validate({"steps": 1, **given}), 0, 0)
        for given in ({}, {"workers": 3, "save_every": 7}, {"precision": "bf16"})
    )
    assert one == same != other
