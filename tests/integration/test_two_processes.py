"""Two real processes (gloo) train as one does: the same gradients and weights; what was stopped goes on.

Under FSDP2, Accelerate's own code runs, told that it is on GPUs (`training_worker.shard`). What a CPU cannot show:
NCCL, kernels, memory. bench/nightly/test_two_processes.py has more cases.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
from torch import Tensor

from surgery.train.checkpoints import checkpoints
from tests.integration.conftest import ROOT
from tests.support import training_worker as worker
from tests.support.training_worker import launch


def assert_apart(found: dict[str, Tensor], expected: dict[str, Tensor], limit: float) -> None:
    """The largest distance of two tensors of one name."""
    assert found.keys() == expected.keys()
    worst = max(expected, key=lambda name: float((found[name] - expected[name]).abs().max()))
    assert float((found[worst] - expected[worst]).abs().max()) <= limit, worst


def test_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    """Answers of different lengths on each: a mean of the processes' means would be another gradient."""
    two, one = launch(tmp_path, "gradients"), worker.gradients(tmp_path)
    assert two.keys() == one.keys() and len(one) > 20
    scale = torch.stack([g.norm() for g in one.values()]).norm()
    apart = torch.stack([(two[name] - g).norm() for name, g in one.items()]).norm()
    assert float(apart / scale) < 1e-6


def test_weights_are_those_of_one_process_and_a_stopped_run_goes_on(tmp_path: Path) -> None:
    """Sharded or not, five AdamW steps in fp64: rounding in near-zero gradients is all that Adam could make large.

    A checkpoint of two processes that shard serves one, whose weights are sharded or whole.
    """
    (tmp_path / "one").mkdir()
    one = worker.weights(tmp_path / "one", 5)
    for kind in ("", "sharded "):
        place = tmp_path / (kind.strip() or "whole")
        place.mkdir()
        launch(place, f"{kind}stop", code=1)
        (step,) = checkpoints(place / "steps")
        assert step.name == "step_000002", kind
        shutil.copytree(place / "steps", tmp_path / "kept", dirs_exist_ok=True)
        assert_apart(launch(place, f"{kind}weights"), one, 1e-7)
    for case in ("weights", "sharded weights"):
        shutil.rmtree(place / "steps")
        shutil.copytree(tmp_path / "kept", place / "steps")
        assert_apart(launch(place, case, processes=1), one, 1e-7)


def test_accelerate_takes_the_shipped_launch_files() -> None:
    kinds = {"ddp": DistributedType.MULTI_GPU, "fsdp2": DistributedType.FSDP, "deepspeed": DistributedType.DEEPSPEED}
    for name, kind in kinds.items():
        found = load_config_from_file(str(ROOT / "recipes" / "accelerate" / f"{name}.yaml"))
        assert found.distributed_type == kind and found.mixed_precision == "no", name
        assert found.num_processes > 1 and not found.use_cpu, name
