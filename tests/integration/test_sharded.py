"""Accelerate's FSDP2 on two real processes (gloo): it trains as one process does, and what was stopped goes on.

Its own code runs, told that it is on GPUs (`training_worker.shard`). What a CPU cannot show: NCCL, kernels, memory.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
from torch import Tensor

from tests.support import training_worker as worker
from tests.support.pico import pico_hybrid, pico_site
from tests.support.training_worker import ROOT, launch

Runs = dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`stopped/`: a sharded training that ended in its fourth step of five; `kept/` holds the steps that it left."""
    folder = tmp_path_factory.mktemp("sharded")
    (folder / "stopped").mkdir()
    launch(folder / "stopped", "sharded stop", code=1)
    shutil.copytree(folder / "stopped" / "steps", folder / "kept")
    return folder


@pytest.fixture(scope="module")
def two(folder: Path) -> Runs:
    """What two processes found, run by run."""
    runs: Runs = {}
    for name, tensor in launch(folder, "sharded").items():
        run, _, parameter = name.partition("/")
        runs.setdefault(run, {})[parameter] = tensor
    return runs


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Weights after five steps of one process, in fp64."""
    return worker.weights(tmp_path_factory.mktemp("one"), 5)


def assert_apart(found: dict[str, Tensor], expected: dict[str, Tensor], limit: float) -> None:
    """The largest distance of two tensors of one name."""
    assert found.keys() == expected.keys()
    worst = max(expected, key=lambda name: float((found[name] - expected[name]).abs().max()))
    assert float((found[worst] - expected[worst]).abs().max()) <= limit, worst


@pytest.mark.parametrize("run", ["gradient", "checkpointed"])
def test_gradients_are_those_of_one_process(two: Runs, run: str, tmp_path: Path) -> None:
    one = worker.gradients(tmp_path)
    assert two[run].keys() == one.keys() and len(one) > 20
    scale = torch.stack([g.norm() for g in one.values()]).norm()
    apart = torch.stack([(two[run][name] - g).norm() for name, g in one.items()]).norm()
    assert float(apart / scale) < 1e-6


def test_weights_are_whole_again_and_those_of_one_process(two: Runs, one: dict[str, Tensor]) -> None:
    assert_apart(two["uninterrupted"], one, 1e-7)


def test_a_stopped_run_goes_on_exactly(two: Runs) -> None:
    assert_apart(two["resumed"], two["uninterrupted"], 0)


@pytest.mark.parametrize("case", ["sharded weights", "weights"])
def test_a_checkpoint_of_two_processes_serves_one(case: str, two: Runs, folder: Path, one: dict[str, Tensor]) -> None:
    """Whose weights are sharded, or whole."""
    shutil.rmtree(folder / "stopped" / "steps")
    shutil.copytree(folder / "kept", folder / "stopped" / "steps")
    found = launch(folder / "stopped", case, processes=1)
    assert_apart(found, one, 1e-7)


def test_adapters_and_new_heads_over_a_frozen_bf16_base(two: Runs, tmp_path: Path) -> None:
    """Two dtypes in one shard. In bf16 the two worlds round apart, and Adam's first steps are of the learning rate."""
    assert_apart(two["lora"], worker.lora(tmp_path, 2), 0.05)
    before = {name: p.bfloat16() for name, p in pico_hybrid([pico_site(1)], **worker.SHAPE).named_parameters()}
    after = {name.replace(".base_layer", ""): weight for name, weight in two["lora"].items()}
    moved = {name for name, weight in after.items() if name not in before or not torch.equal(weight, before[name])}
    new = {name for name in after if ".lora_" in name or ".attention." in name}
    assert moved == new and {after[name].dtype for name in new} == {torch.float32}
    assert all(after[name].any() for name in new if ".lora_B" in name)


class TestLaunchFiles:
    @pytest.mark.parametrize(
        ("name", "kind"),
        [("ddp", DistributedType.MULTI_GPU), ("fsdp2", DistributedType.FSDP), ("deepspeed", DistributedType.DEEPSPEED)],
    )
    def test_accelerate_takes_them(self, name: str, kind: DistributedType) -> None:
        path = str(ROOT / "recipes" / "accelerate" / f"{name}.yaml")
        found = load_config_from_file(path)
        assert found.distributed_type == kind and found.mixed_precision == "no"
        assert found.num_processes > 1 and not found.use_cpu
