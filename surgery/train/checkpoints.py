"""Checkpoints to resume from. Owns: `step_*/`, written whole, the two newest kept. Must never know: losses, data.

A checkpoint that cannot be read is set aside as `broken_step_*`, and the one before it is taken.

model.safetensors, optimizer.pt, state.json       where every process has all weights; the main one writes
shards/, state.json                               where each has its part: every process writes its own
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException

from surgery.errors import RunError
from surgery.files.atomic import is_full, new_folder, sweep
from surgery.train.checkpoint_files import OPTIMIZER, SHARDS, STATE, WEIGHTS, ShardReader, fault_of
from surgery.train.sharded import is_sharded

_KEPT = 2  # the newest, and the one before it in case that one cannot be read
_LOG = logging.getLogger(__name__)


def checkpoints(folder: Path) -> list[Path]:
    """The `step_*` folders, oldest first."""
    found = (p for p in folder.glob("step_*") if re.fullmatch(r"step_\d+", p.name))
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def set_aside_broken(folder: Path, accelerator: Accelerator) -> None:
    """Clears away what a kill left half-written, and renames every checkpoint that cannot be read to `broken_step_*`.

    Every process calls it, before any of them looks at the folder.
    """
    if folder.exists() and accelerator.is_main_process:
        sweep(folder)
        for step in checkpoints(folder):
            fault = fault_of(step)
            if fault is not None:
                aside = step.with_name(f"broken_{step.name}")
                shutil.rmtree(aside, ignore_errors=True)
                step.rename(aside)
                _LOG.warning("%s cannot be read (%s): set aside as %s", step, fault, aside.name)
    accelerator.wait_for_everyone()


def save_step(
    folder: Path, model: nn.Module, optimizer: Any, step: int, state: dict[str, Any], accelerator: Accelerator
) -> None:
    """Writes `step_*/` whole, then drops all but the two newest. Every process calls it.

    Args:
        state: plain data; `of` in it names the training that this is a step of.

    Raises:
        RunError: the disk is full; the older checkpoint stays.
    """
    target, sharded = folder / f"step_{step:06d}", is_sharded(model)
    if sharded or accelerator.is_main_process:
        write = _write_sharded if sharded else _write
        try:
            write(target, model, optimizer, {"step": step, **state}, accelerator)
        except (CheckpointException, Exception) as error:
            if not is_full(error.__cause__ or error):
                raise
            raise RunError("steps", str(target), _full(folder)) from None
    if accelerator.is_main_process:
        for old in checkpoints(folder)[:-_KEPT]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def _full(folder: Path) -> str:
    found = checkpoints(folder)
    kept = f"{found[-1].name} is kept, and the run goes on from there" if found else "No step was saved before"
    return f"The disk is full. {kept}. Make room, and start again."


def _write(target: Path, model: nn.Module, optimizer: Any, state: dict[str, Any], accelerator: Accelerator) -> None:
    with new_folder(target) as folder:
        weights = {k: v.detach().cpu().contiguous() for k, v in model.named_parameters()}
        save_file(weights, folder / WEIGHTS)
        torch.save(optimizer.state_dict(), folder / OPTIMIZER)
        (folder / STATE).write_text(json.dumps(state))


def _write_sharded(
    target: Path, model: nn.Module, optimizer: Any, state: dict[str, Any], accelerator: Accelerator
) -> None:
    with _common_folder(target, accelerator) as folder:
        tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            moments: dict[str, Tensor] = optimizer.state.get(parameter, {})
            tensors |= {f"optimizer.{name}.{what}": moment for what, moment in moments.items()}
        dcp.save(tensors, checkpoint_id=folder / SHARDS)  # returns when every process has written
        if accelerator.is_main_process:
            (folder / STATE).write_text(json.dumps(state))


@contextmanager
def _common_folder(target: Path, accelerator: Accelerator) -> Iterator[Path]:
    """A new folder that every process fills; the main one makes it, and renames it when it is done itself."""
    if not accelerator.is_main_process:
        name: list[str | None] = [None]
        broadcast_object_list(name)
        yield Path(str(name[0]))
        return
    with new_folder(target) as folder:
        broadcast_object_list([str(folder)])
        yield folder


def load_step(
    folder: Path, model: nn.Module, optimizer: Any, identity: str, accelerator: Accelerator
) -> dict[str, Any] | None:
    """Loads the newest checkpoint that can be read and returns its state; None if there is none.

    Every process calls it.

    Raises:
        RunError: it belongs to another training, or weights are sharded now and were not then, or the reverse.
    """
    set_aside_broken(folder, accelerator)
    found = checkpoints(folder)
    if not found:
        return None
    state: dict[str, Any] = json.loads((found[-1] / STATE).read_text(encoding="utf-8"))
    if state["of"] != identity:
        hint = "It belongs to another training. Delete it, or name another folder."
        raise RunError("steps", str(found[-1]), hint)
    was_sharded = (found[-1] / SHARDS).is_dir()
    if was_sharded != is_sharded(model):
        kinds = ("sharded", "whole") if was_sharded else ("whole", "sharded")
        hint = f"Its weights are {kinds[0]}, those of this launch {kinds[1]}. Launch as before, or delete it."
        raise RunError("steps", str(found[-1]), hint)
    (_read_sharded if was_sharded else _read)(found[-1], model, optimizer)
    return state


def _read(step: Path, model: nn.Module, optimizer: Any) -> None:
    weights = load_file(step / WEIGHTS)
    _check_names(step, weights.keys(), model)
    moments = torch.load(step / OPTIMIZER, weights_only=True, map_location="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    optimizer.load_state_dict(moments)


def _read_sharded(step: Path, model: nn.Module, optimizer: Any) -> None:
    """Of any number of processes: each reads what it holds now, whoever wrote it."""
    parameters = dict(model.named_parameters())
    reader = ShardReader(step / SHARDS)
    saved = reader.read_metadata().state_dict_metadata
    _check_names(step, {key.removeprefix("model.") for key in saved if key.startswith("model.")}, model)
    tensors = {f"model.{name}": p.detach() for name, p in parameters.items()}
    for key in saved.keys() - tensors.keys():
        name, _, what = key.removeprefix("optimizer.").rpartition(".")
        parameter = parameters[name]
        tensors[key] = torch.zeros(()) if what == "step" else torch.zeros_like(parameter.detach())
        optimizer.state[parameter][what] = tensors[key]
    dcp.load(tensors, storage_reader=reader)


def _check_names(step: Path, saved: Any, model: nn.Module) -> None:
    apart = set(saved) ^ {name for name, _ in model.named_parameters()}
    if apart:
        hint = f"It has other weights: {min(apart)} and {len(apart) - 1} more. Delete it, or name another folder."
        raise RunError("steps", str(step), hint)
