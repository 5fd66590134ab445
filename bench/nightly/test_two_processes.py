"""More of what two processes do as one: packed rows, a plateau, adapters, checkpointing; the real command in both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.integration.conftest import RECIPE, SMALL, run_small
from tests.support import training_worker as worker
from tests.support.kernels import with_kernels
from tests.support.pico import pico_hybrid, pico_site
from tests.support.training_worker import launch


def relative_distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys() and expected
    scale = torch.stack([g.norm() for g in expected.values()]).norm()
    return float(torch.stack([(found[name] - g).norm() for name, g in expected.items()]).norm() / scale)


@pytest.mark.parametrize("case", ["packed", "sharded packed"])
def test_packed_documents_are_those_of_one_process_in_padded_rows(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under DDP and under FSDP2, with kernels in plain torch."""
    with_kernels(monkeypatch)
    one = worker.gradients(tmp_path, **worker.packed(tmp_path))
    assert 0 < relative_distance(launch(tmp_path, case), one) < 1e-5


def test_losses_are_those_of_one_process_up_to_the_same_plateau(tmp_path: Path) -> None:
    two, one = launch(tmp_path, "losses"), worker.losses(tmp_path)
    assert any("last_step" in step for step in one) and len(one) < 9
    for name, values in two.items():
        assert values.tolist() == pytest.approx([step[name] for step in one], rel=1e-4), name


def test_shards_checkpoint_activations_and_train_adapters(tmp_path: Path) -> None:
    """Adapters and new heads over a frozen bf16 base: two dtypes in one shard. In bf16 the two worlds round apart, and
    Adam's first steps are of the learning rate."""
    runs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in launch(tmp_path, "sharded").items():
        run, _, parameter = name.partition("/")
        runs.setdefault(run, {})[parameter] = tensor
    for name in ("gradient", "checkpointed"):
        assert relative_distance(runs[name], worker.gradients(tmp_path)) < 1e-6, name
    reads = worker.gradients(tmp_path, **worker.READS)
    assert relative_distance(runs["reads"], reads) < 1e-6 and any(gradient.any() for gradient in reads.values())
    lora, one = runs["lora"], worker.lora(tmp_path, 2)
    assert lora.keys() == one.keys() and max(float((lora[n] - one[n]).abs().max()) for n in one) <= 0.05
    before = {name: p.bfloat16() for name, p in pico_hybrid([pico_site(1)], **worker.SHAPE).named_parameters()}
    after = {name.replace(".base_layer", ""): weight for name, weight in lora.items()}
    moved = {name for name, weight in after.items() if name not in before or not torch.equal(weight, before[name])}
    new = {name for name in after if ".lora_" in name or ".attention." in name}
    assert moved == new and {after[name].dtype for name in new} == {torch.float32}
    assert all(after[name].any() for name in new if ".lora_B" in name)


def test_the_command_in_two_processes(tmp_path: Path) -> None:
    """Rank 0 writes the run folder; both ranks train on their share of every batch."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    shared = ("locate.batch_size=4",)
    command = [*torchrun, "-m", "surgery", "run", str(RECIPE), *SMALL, *shared, "--to", "train", "train.steps=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("train  done") == 1
    weights = load_file(tmp_path / "runs" / "quickstart" / "trained" / "model.safetensors")
    assert all(bool(torch.isfinite(w).all()) for w in weights.values())
    alone = tmp_path / "alone"
    alone.mkdir()
    assert run_small(alone, *shared, options=("--to", "locate")).returncode == 0
    heads = [(path / "runs" / "quickstart" / "heads.json").read_text() for path in (tmp_path, alone)]
    assert heads[0] == heads[1], "both processes measured half of the prompts; the result is that of one"
