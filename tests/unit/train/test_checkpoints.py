"""Checkpoints of whole and of sharded weights, in a world of one process: round trips, refusals, full disks."""

from __future__ import annotations

import errno
import json
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.fsdp import fully_shard

from surgery.errors import RunError
from surgery.files import atomic
from surgery.train import checkpoints as checkpoints_module
from surgery.train.checkpoint_files import fault_of
from surgery.train.checkpoints import checkpoints, load_checkpoint, save_checkpoint
from surgery.train.sharded import full, is_sharded
from tests.support.processes import leftover

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
        save_checkpoint(folder, self.model, self.optimizer, step, OF, self.accelerator)

    def load(self, folder: Path, of: str = "this") -> dict[str, Any] | None:
        return load_checkpoint(folder, self.model, self.optimizer, of, self.accelerator)

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


def test_an_index_that_another_python_wrote_is_read(tmp_path: Path) -> None:
    """Python 3.13 names the class of a path `pathlib._local.PosixPath`, other versions `pathlib.PosixPath`."""
    Training(sharded=True).save(tmp_path)
    (file,) = tmp_path.glob("*/shards/.metadata")
    index = pickle.dumps(pickle.loads(file.read_bytes()), protocol=3)  # noqa: S301  (names are plain text)
    for module in (b"cpathlib\n", b"cpathlib._local\n"):
        written = re.sub(rb"cpathlib(\._local)?\n", module, index)
        assert module in written
        file.write_bytes(written)
        assert Training(sharded=True, seed=1).load(tmp_path) == {"step": 1, **OF}


def test_before_the_first_step_there_are_no_moments(sharded: bool, tmp_path: Path) -> None:
    saved, loaded = Training(sharded), Training(sharded, seed=1)
    saved.save(tmp_path, step=0)
    loaded.load(tmp_path)
    assert not loaded.optimizer.state
    for training in (saved, loaded):
        training.step()
    assert_same(loaded, saved)


def test_the_two_newest_are_kept_and_nothing_else(sharded: bool, tmp_path: Path) -> None:
    training = Training(sharded)
    for step in (1, 2, 999_999, 1_000_000):
        training.step()
        training.save(tmp_path, step)
    assert {p.name for p in tmp_path.iterdir()} == {"step_999999", "step_1000000"}
    names = {"shards"} if sharded else {"model.safetensors", "optimizer.pt"}
    for step in checkpoints(tmp_path):
        assert {p.name for p in step.iterdir()} == names | {"state.json"}
    state = Training(sharded).load(tmp_path)
    assert state is not None and state["step"] == 1_000_000


def test_killed_while_it_deletes_the_oldest_every_checkpoint_is_whole(
    sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, delete = Training(sharded), shutil.rmtree

    def die(folder: Path, *args: Any, **options: Any) -> None:
        if folder.name == "outdated":
            (folder / "state.json").unlink()
            raise KeyboardInterrupt
        delete(folder, *args, **options)

    for step in (1, 2):
        training.save(tmp_path, step)
    monkeypatch.setattr(atomic.shutil, "rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        training.save(tmp_path, 3)
    monkeypatch.undo()
    assert [(step.name, fault_of(step)) for step in checkpoints(tmp_path)] == [
        ("step_000002", None),
        ("step_000003", None),
    ]
    training.save(tmp_path, 4)
    training.load(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000003", "step_000004"]


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
    for broken in ([], None, {}, {**state, "step": "2"}, {**state, "history": {}}, {**state, "of": 1}):
        yield step / "state.json", json.dumps(broken).encode()
    for broken in ({**state, "step": 7}, {**state, "history": [[]]}):
        yield step / "state.json", json.dumps(broken).encode()
    yield step / "state.json", b"[" * 100_000
    yield step / "state.json", b'{"of": "\xff"}'


def test_one_that_was_cut_short_is_set_aside_and_the_one_before_it_taken(
    sharded: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = Training(sharded)
    saved.step()
    saved.save(tmp_path / "whole", 1)
    first = saved.weights()
    saved.step()
    saved.save(tmp_path / "whole", 2)
    found = list(damages(tmp_path / "whole" / "step_000002"))
    assert len(found) > (20 if sharded else 30)
    for number, (path, data) in enumerate(found):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", folder)
        target = folder / path.relative_to(tmp_path / "whole")
        target.unlink() if data is None else target.write_bytes(data)
        caplog.clear()
        loaded = Training(sharded, seed=1)
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


def test_where_none_can_be_read_nothing_is_touched(sharded: bool, tmp_path: Path) -> None:
    Training(sharded).save(tmp_path)
    (tmp_path / "step_000001" / "state.json").write_text("")
    other = Training(sharded, seed=1)
    assert other.load(tmp_path) is None
    assert_same(other, Training(sharded, seed=1))
    assert not other.optimizer.state
    Training(sharded).save(tmp_path)
    (tmp_path / "step_000001" / "state.json").write_text("again")
    assert other.load(tmp_path) is None
    assert [p.name for p in tmp_path.iterdir()] == ["broken_step_000001"]


class Runs:
    """A pickle that would run code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_no_pickle_of_a_checkpoint_runs_code(sharded: bool, tmp_path: Path) -> None:
    Training(sharded).save(tmp_path)
    step = tmp_path / "step_000001"
    for name in ("shards/.metadata", "shards/__0_0.distcp") if sharded else ("optimizer.pt", "model.safetensors"):
        for dump in (pickle.dump, torch.save):
            shutil.copytree(step, tmp_path / "kept" / step.name)
            with open(tmp_path / "kept" / step.name / name, "wb") as file:
                dump({"state": Runs(tmp_path / "ran"), "param_groups": []}, file)
            assert fault_of(tmp_path / "kept" / step.name) is not None
            assert Training(sharded).load(tmp_path / "kept") is None
            assert not (tmp_path / "ran").exists()
            shutil.rmtree(tmp_path / "kept")


def full_disk() -> dict[str, Exception]:
    """How each library says that a disk is full."""
    rust = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    zipped = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 2091904 vs 2091856")
    return {"save_file": rust, "save": zipped, "dumps": OSError(errno.ENOSPC, "No space left on device")}


@pytest.mark.parametrize("call", ["save_file", "save", "dumps"])
def test_a_full_disk_at_any_file_leaves_the_last_ones(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(sharded=False)
    training.save(tmp_path)

    def fail(*given: Any, **named: Any) -> None:
        raise full_disk()[call]

    where = {"save_file": checkpoints_module, "save": torch, "dumps": json}[call]
    monkeypatch.setattr(where, call, fail)
    with pytest.raises(RunError, match=r"The disk is full\. step_000001 is kept"):
        training.save(tmp_path, step=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]
    monkeypatch.undo()
    assert fault_of(tmp_path / "step_000001") is None


def test_none_to_load(sharded: bool, tmp_path: Path) -> None:
    assert Training(sharded).load(tmp_path / "missing") is None


def test_the_other_kind_is_refused(sharded: bool, tmp_path: Path) -> None:
    Training(sharded).save(tmp_path)
    with pytest.raises(RunError, match=f"Its weights are {'sharded' if sharded else 'whole'}, but those of this"):
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


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "full"), OSError(errno.EDQUOT, "full"), RuntimeError("... unexpected pos 576 vs 534")],
)
def test_a_full_disk_leaves_the_last_one(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(sharded=True)
    training.save(tmp_path)
    _failing(monkeypatch, error)
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
    leftover(tmp_path / "step_000002")
    state = training.load(tmp_path)
    assert state is not None and state["step"] == 1
    assert checkpoints(tmp_path) == list(tmp_path.iterdir())
    assert json.loads((tmp_path / "step_000001" / "state.json").read_text())["of"] == "this"
