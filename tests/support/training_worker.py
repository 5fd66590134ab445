"""A small training in processes of its own, for tests that need several of them or kill one.

Rank 0 of the processes that `launch` starts writes FOLDER/out.safetensors. A CASE that begins with `sharded` runs under
Accelerate's FSDP2.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import load_file, save_file
from torch import Tensor

from surgery.models.lookup import family_of
from surgery.recipe import Train
from surgery.train.sharded import full
from surgery.train.targets import Targets
from surgery.train.trainer import StageTrainer
from surgery.train.training import make_accelerator
from surgery.types import Graft
from tests.support.kernels import with_kernels
from tests.support.pico import pico_base, pico_hybrid, pico_site, pico_tokenizer
from tests.support.processes import start

ROOT = Path(__file__).parents[2]
FSDP2 = ROOT / "recipes" / "accelerate" / "fsdp2.yaml"
SCRIPT = "from tests.support.training_worker import main; main()"
SHAPE: dict[str, Any] = {"vocab_size": 1024, "layers": 2}
KV = {"task": "kv_retrieval", "rows": 5, "pairs": (2, 9), "questions": 3, "weights": {"answer": 1, "attention": 0.5}}
TEXT = {"task": "sentence", "rows": 3, "weights": {"base_kl": 1.0, "lm": 0.5}}


def launch(folder: Path, case: str, code: int = 0, processes: int = 2) -> dict[str, torch.Tensor]:
    """Run a case in so many processes that train together, as `torchrun` starts them.

    Returns:
        the tensors that rank 0 writes; none if the processes must fail, as `code` says.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    started = []
    for rank in range(processes):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        sizes = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **address, **ranks, **sizes}
        started.append(start([__file__, str(folder), case], ROOT, environment, SCRIPT))
    try:
        ended = [process.wait(240) for process in started]
    finally:  # a process that waits for another one does not end with it
        for process in started:
            process.kill(signal.SIGKILL)
    for process in ended:
        assert (process.returncode != 0) == bool(code), process.stderr[-3000:]
    if code:
        return {}
    found = load_file(folder / "out.safetensors")
    assert int(found.pop("world")) == processes
    return found


def data_of(path: Path, lengths: Iterable[int]) -> dict[str, Any]:
    """Data of the user's own, with answers of these lengths."""
    if not path.exists():
        rows = [{"prompt": f"Say {n} times a:", "answer": " a" * n} for n in lengths]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(path)}


def lines(folder: Path) -> dict[str, Any]:
    """A source whose answers have very different lengths, so that halves of a batch differ in tokens."""
    return {"data": data_of(folder / "rows.jsonl", range(1, 12)), "rows": 3, "weights": {"answer": 1.0}}


def uneven(folder: Path) -> dict[str, Any]:
    """Answers so different in length that several of the short ones fit into a row of the longest."""
    data = data_of(folder / "uneven.jsonl", (40, 1, 2, 3, 4, 5, 6, 7, 8, 40, 9, 10))
    return {"data": data, "rows": 12, "weights": {"answer": 1.0, "base_kl": 0.5}}


def packed(folder: Path) -> dict[str, Any]:
    """Sources that share rows. The second one has a document for one of two processes."""
    few = {"task": "sentence", "tokens": 8, "weights": {"base_kl": 1.0, "lm": 0.5}}
    return {"sources": [uneven(folder), few]}


def section(folder: Path, steps: int, **more: Any) -> Train:
    optimizer = {"warmup": 1, "lr": 1e-3, "new_heads_lr": 1e-2, "weight_decay": 0.1}
    sources = [KV, TEXT, lines(folder)]
    return Train.model_validate({"steps": steps, "sources": sources, "save_every": 2, "optimizer": optimizer, **more})


def shard() -> None:
    """From here on Accelerate shards, as under `accelerate launch` with the shipped file.

    On a CPU it would fall back to DDP without a word, so what it decides by is set as on GPUs. All that follows is its
    own: the wrapping, the optimizer's switch to the shards, clipping, `no_sync`.
    """
    words = launch_command_parser().parse_args(["--config_file", str(FSDP2), "-m", "surgery"])
    environment = prepare_multi_gpu_env(_validate_launch_command(words)[0])
    os.environ.update({k: v for k, v in environment.items() if k.startswith(("FSDP_", "ACCELERATE_"))})
    state = make_accelerator().state
    state.fsdp_plugin = FullyShardedDataParallelPlugin()
    state.distributed_type = PartialState().distributed_type = DistributedType.FSDP


def stage_run(folder: Path, train: Train, double: bool = False, on_step: Any = None, layers: int = 2) -> StageTrainer:
    """A hybrid with one spliced head in its last layer, on what `section` says; checkpoints go to FOLDER/steps."""
    shape = {**SHAPE, "layers": layers}
    model, base = pico_hybrid([pico_site(layers - 1)], **shape), pico_base(**shape)
    if double:
        model, base = model.double(), base.double()
    site = family_of(base.config).mixers(base.config)[-1]
    graft = Graft(site, (2,), "add", "ssm", ("segment_end",))
    targets = Targets(base=base, grafts=(graft,))
    steps = folder / "steps"
    return StageTrainer(model, pico_tokenizer(), train, 0, make_accelerator(), targets, folder=steps, on_step=on_step)


def record_gradients(trainer: StageTrainer) -> dict[str, Tensor]:
    """By name, filled in every step before clipping; clipping changes nothing."""
    gradients: dict[str, Tensor] = {}

    def record(parameters: Iterable[Any], norm: float) -> Tensor:
        names = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
        for name, parameter in zip(names, parameters, strict=True):
            if parameter.grad is not None:
                gradients[name] = full(parameter.grad).clone()
        return torch.tensor(1.0)

    trainer.accelerator.clip_grad_norm_ = record  # type: ignore[method-assign]
    return gradients


def gradients(folder: Path, **more: Any) -> dict[str, torch.Tensor]:
    """Of the first step, before clipping."""
    made = stage_run(folder, section(folder, 1, **more))
    recorded = record_gradients(made)
    made.run()
    return recorded


def weights(folder: Path, steps: int, stop: int | None = None, double: bool = True, **more: Any) -> dict[str, Any]:
    """After so many steps. `stop`: after that one the process ends as if killed."""

    def on_step(step: int, _: Any) -> None:
        if step == stop:
            raise SystemExit(9)

    made = stage_run(folder, section(folder, steps, **more), double, on_step)
    made.run()
    return {name: p.detach().clone() for name, p in made.model.named_parameters()}


def lora(folder: Path, steps: int) -> dict[str, torch.Tensor]:
    """Final weights of a bf16 model with new heads and adapters in fp32, as `train` leaves them to be merged."""
    train = section(folder, steps, trainable="lora", precision="bf16", lora={"rank": 4, "targets": ["in_proj"]})
    made = stage_run(folder, train)
    made.model.bfloat16()
    assert made.targets.base is not None
    made.targets.base.bfloat16()
    made.run()
    return {name: p.detach().clone() for name, p in made.model.named_parameters()}


READS: dict[str, Any] = {
    "trainable": "reads",
    "sources": [{**KV, "weights": {"attention": 1.0}}],
    "optimizer": {"warmup": 1, "new_heads_lr": 1e-2},
}


def sharded(folder: Path) -> dict[str, torch.Tensor]:
    """Of four runs: `run/name` of every tensor."""
    runs = {
        "gradient": gradients(folder),
        "checkpointed": gradients(folder, gradient_checkpointing=True, micro_batch=2),
        "reads": gradients(folder, **READS),
        "lora": lora(folder, 2),
    }
    return {f"{run}/{name}": tensor for run, found in runs.items() for name, tensor in found.items()}


def losses(folder: Path) -> list[dict[str, float]]:
    """Of the steps to a plateau: the first loss that is not lower by 2% than the lowest one."""
    ends = {"window": 1, "patience": 1, "threshold": 0.02, "min_steps": 3}
    optimizer = {"warmup": 1, "lr": 1e-3, "new_heads_lr": 1e-2, "schedule": "wsd", "decay": 0.2}
    return stage_run(folder, section(folder, 9, plateau=ends, optimizer=optimizer)).run()


def main() -> None:
    folder, case = Path(sys.argv[1]), sys.argv[2]
    if case.startswith("sharded"):
        shard()
    accelerator = make_accelerator()
    world = torch.tensor(accelerator.num_processes)
    found: dict[str, Any] = {}
    if case == "sharded":
        found = sharded(folder)
    elif case == "gradients":
        found = gradients(folder)
    elif case.endswith("packed"):
        with pytest.MonkeyPatch.context() as patch:
            with_kernels(patch)
            found = gradients(folder, **packed(folder), packing=True)
    elif case == "losses":
        found = {
            name: torch.tensor([h[name] for h in losses(folder)])
            for name in ("answer", "attention", "base_kl", "lm", "tokens")
        }
    elif case.endswith("stop"):
        weights(folder, 5, stop=3)
    else:
        found = weights(folder, 5)
    if accelerator.is_main_process:
        save_file({"world": world, **found}, folder / "out.safetensors")
