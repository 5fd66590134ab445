"""Run the training loop of `surgery run` at the shape of mamba2-130m, in each way that a recipe can set.

    all, checkpointing     hybrid against base: time of a step, peak of memory; bf16 with fp32 master weights
    lora                   with checkpointing and all installed fused kernels: every adapter must move
    ddp, fsdp2             one process under `accelerate launch` with the files of recipes/accelerate/: losses and
                           weights equal those of the plain run
    compile                torch.compile of the hybrid: its losses equal those of the plain run
    packing                documents of very different lengths, packed into rows against padded: the same losses, and
                           the time of both

Weights are random, so no loss may grow. On a CPU there is no FSDP2 (Accelerate falls back to DDP), and no compiling.
"""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.gpu.env import Row
from bench.gpu.models import in_words, timed_plan, watch
from bench.gpu.runner import ROOT, Options, note
from surgery.models.loading import load_config
from surgery.probes.documents import rng_of
from surgery.probes.kv_retrieval import kv_document
from surgery.recipe import Base, Train
from surgery.splice.graft import splice_model
from surgery.train.packing import packing_fault
from surgery.train.training import make_accelerator, train_model
from surgery.types import Plan
from tests.support.pico import pico_config, pico_tokenizer

SHAPES, TOY = ("mamba2-130m",), ("toy",)
TASKS = ("lora", "all", "checkpointing", "packing", "fsdp2", "ddp", "compile")
WARM_UP = 3  # steps that are not timed
APART = 0.02  # of two losses in bf16, relative
GROWN = 1.2  # of a loss over the first; documents differ
SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {"trainable": "lora", "gradient_checkpointing": True},
    "checkpointing": {"gradient_checkpointing": True},
    "compile": {"compile": True},
    "packing": {"packing": True},
    "padded": {"packing": False},
}
UNEVEN = ("packing", "padded")  # trained on documents of very different lengths


@dataclass
class Run:
    """Result of one training: loss and seconds of every step, peak bytes (None on a CPU), Accelerate's kind of launch.

    Attributes:
        checksum: the sum of all weights' magnitudes at the end.
        moved: whether every adapter is other than it began.
        ran: whose code the recurrences were.
        not_packed: reason why documents do not share rows in the task `packing`.
    """

    losses: list[float]
    seconds: list[float]
    peak: int | None
    kind: str
    checksum: float
    moved: bool
    ran: str
    not_packed: str | None = None


def items(options: Options) -> list[str]:
    """`shape | task`."""
    tasks = [task for task in TASKS if task not in ("compile", "fsdp2") or options.device == "cuda"]
    return [f"{name} | {task}" for name in (TOY if options.toy else SHAPES) for task in tasks]


def warm(options: Options) -> list[str]:
    """Those that run other kernels; `all` runs with `compile`."""
    return [item for item in items(options) if item.split(" | ")[1] in ("lora", "packing", "compile")]


def run(item: str, options: Options) -> list[Row]:
    """One row of `training`."""
    name, task = item.split(" | ")
    if task in ("ddp", "fsdp2"):
        return [_launched(name, task, options)]
    hybrid = trained(name, task, "hybrid", options)
    if task == "packing":
        return _packing(name, hybrid, trained(name, "padded", "hybrid", options), options)
    row = {**_row(name, task, hybrid), "ran": hybrid.ran}
    if task == "compile":
        return [{**row, **against(hybrid, trained(name, "all", "hybrid", options))}]
    base = trained(name, task, "base", options)
    ratio = _middle(hybrid) / _middle(base)
    return [{**row, "base": 1e3 * _middle(base), "base GiB": _gib(base.peak), "ratio": ratio}]


def _packing(name: str, packed: Run, padded: Run, options: Options) -> list[Row]:
    """Train packed and padded, and report the packed time as a fraction of the padded time."""
    rows = [_row(name, "padded", padded), {**_row(name, "packing", packed), "ran": packed.ran}]
    together = against(packed, padded)
    rows[1] |= {**together, "ok": rows[1]["ok"] and together["ok"]}
    text = f"{_middle(packed) / _middle(padded):.2f} of the padded step's time"
    fault = packed.not_packed
    return [*rows, note("packing", text) if fault is None else note("packing", f"refused: {fault}", failed=True)]


@lru_cache(maxsize=4)
def trained(name: str, task: str, arm: str, options: Options) -> Run:
    """A training of one arm, here."""
    base = _base(name, options)
    plan = timed_plan(name, base.config) if arm == "hybrid" else None
    model = base if plan is None else splice_model(base, plan)
    del base
    try:
        return _train(model, plan, task, options)
    finally:
        del model
        gc.collect()
        torch.cuda.empty_cache()


def _base(name: str, options: Options) -> PreTrainedModel:
    """The same random weights for both arms, and in every process."""
    if options.toy:
        config = pico_config(layers=4, vocab_size=1024)
    else:
        config = load_config(Base(model=str(ROOT / "recipes" / "configs" / name)))  # type: ignore[assignment]
    torch.manual_seed(0)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _train(model: PreTrainedModel, plan: Plan | None, task: str, options: Options) -> Run:
    accelerator, cuda = make_accelerator(), options.device == "cuda"
    fault = packing_fault({"hybrid": model.to(accelerator.device).train()}) if task == "packing" else None
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with watch(model) as ran, tempfile.TemporaryDirectory() as folder:
        section, out = _section(task, options, Path(folder)), Path(folder) / "out"
        history = train_model(
            model, pico_tokenizer(), section, plan, accelerator=accelerator, outputs=out if task == "lora" else None
        )
        adapters = [load_file(path) for path in out.rglob("*.safetensors")]
    return Run(
        losses=[entry["loss"] for entry in history],
        seconds=[entry["seconds"] for entry in history],
        peak=torch.cuda.max_memory_allocated() if cuda else None,
        kind=_kind(accelerator),
        checksum=float(sum(p.detach().double().abs().sum().cpu() for p in model.parameters())),
        moved=all(bool(p.any()) for saved in adapters for name, p in saved.items() if "lora_B" in name),
        ran=in_words(ran),
        not_packed=fault,
    )


def _kind(accelerator: Accelerator) -> str:
    if accelerator.is_fsdp2:
        return "FSDP2"
    kind = accelerator.distributed_type
    return "plain" if kind == DistributedType.NO else str(DistributedType(kind).value)


def _section(task: str, options: Options, folder: Path) -> Train:
    """Settings with about 9,000 tokens per step and a constant learning rate from the second step on.

    All documents have the same length, except in the packing tasks.
    """
    rows, pairs = (2, 4) if options.toy else (16, 90)
    source = {"task": "kv_retrieval", "rows": rows, "pairs": (pairs, pairs), "questions": 4}
    if task in UNEVEN:
        source = _uneven(folder, *((8, 12) if options.toy else (40, 100)))
    weights = {"answer": 1.0, "lm": 1.0, "attention": 1.0}
    optimizer = {"lr": 1e-3, "new_heads_lr": 1e-3, "warmup": 1, "schedule": "constant"}
    given = {"steps": WARM_UP + options.repeats, "precision": "bf16", "optimizer": optimizer, **SETTINGS.get(task, {})}
    return Train.model_validate({**given, "sources": [{**source, "weights": weights}]})


def _uneven(folder: Path, count: int, longest: int) -> dict[str, Any]:
    """Write dictionaries of 2 pairs or more, most of them short. Every step uses all of them."""
    path = folder / "rows.jsonl"
    with path.open("w") as file:
        for i in range(count):
            document = kv_document(rng_of("packing", i), max(2, round(longest * (i / (count - 1)) ** 3)))
            (question,) = document.questions
            start, end = question.answer
            row = {"prompt": document.text[:start], "answer": document.text[start:end], "span": question.value}
            file.write(json.dumps(row) + "\n")
    return {"data": {"path": str(path), "columns": {"answer_span": "span"}}, "rows": count}


def _launched(name: str, task: str, options: Options) -> Row:
    """Train in one process under `accelerate launch`, to compare with the plain run."""
    plain = trained(name, "all", "hybrid", options)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        given = json.dumps({"name": name, "out": str(out), **asdict(options)})
        config = str(ROOT / "recipes" / "accelerate" / f"{task}.yaml")
        words = ["--config_file", config, "--num_processes", "1", "-m", "bench.gpu.training", given]
        command = [sys.executable, "-m", "accelerate.commands.launch", *words]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
        if done.returncode:
            raise RuntimeError(" | ".join(done.stderr.strip().splitlines()[-6:])[-400:])
        found = Run(**json.loads(out.read_text()))
    row = {**_row(name, task, found), **against(found, plain)}
    if task == "fsdp2" and options.device == "cuda":
        row["ok"] = row["ok"] and found.kind == "FSDP2"
    return row


def _row(name: str, task: str, found: Run) -> Row:
    fine = all(math.isfinite(loss) and loss < GROWN * found.losses[0] for loss in found.losses) and found.moved
    peak = {"hybrid": 1e3 * _middle(found), "hybrid GiB": _gib(found.peak)}
    return {"table": "training", "shape": name, "task": task, "kind": found.kind, "unit": "ms", **peak, "ok": fine}


def against(found: Run, plain: Run) -> Row:
    """Largest relative difference between two runs of the same steps."""
    losses = zip(found.losses, plain.losses, strict=True)
    apart = max(abs(a - b) / b for a, b in losses)
    weights = abs(found.checksum - plain.checksum) / plain.checksum
    return {"apart": apart, "ok": apart < APART and weights < APART}


def _middle(found: Run) -> float:
    return median(found.seconds[WARM_UP:])


def _gib(peak: int | None) -> float | None:
    return None if peak is None else peak / 2**30


def main(words: str) -> None:
    """Run in the process that `_launched` starts."""
    given = json.loads(words)
    name, out = given.pop("name"), Path(given.pop("out"))
    out.write_text(json.dumps(asdict(trained(name, "all", "hybrid", Options(**given)))))


if __name__ == "__main__":
    main(sys.argv[1])
