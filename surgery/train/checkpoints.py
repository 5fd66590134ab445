"""Checkpoints to resume from: `step_*/`, written atomically. The two newest are kept.

A checkpoint that cannot be read is renamed to `broken_step_*`, and the one before it is used. Its files are:

    model.safetensors, optimizer.pt, state.json       whole weights, written by the main process
    shards/, state.json                               sharded weights, each written by its own process
"""

from __future__ import annotations

import json
import logging
import re
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
from surgery.files.atomic import delete, is_full, new_folder, staging, sweep
from surgery.train.checkpoint_files import OPTIMIZER, SHARDS, STATE, WEIGHTS, ShardReader, fault_of
from surgery.train.sharded import is_sharded

_KEEP = 2  # the newest, and one more in case that one cannot be read
_LOG = logging.getLogger(__name__)


def checkpoints(folder: Path) -> list[Path]:
    """List the `step_*` folders, oldest first."""
    folders = (p for p in folder.glob("step_*") if re.fullmatch(r"step_\d+", p.name))
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step_")))


def set_aside_broken(folder: Path, accelerator: Accelerator) -> None:
    """Remove half-written files, and rename every checkpoint that cannot be read to `broken_step_*`.

    All processes must call it, before any of them reads the folder.
    """
    if folder.exists() and accelerator.is_main_process:
        sweep(folder)
        for step in checkpoints(folder):
            fault = fault_of(step)
            if fault is not None:
                aside = step.with_name(f"broken_{step.name}")
                delete(aside)
                step.rename(aside)
                _LOG.warning("%s cannot be read (%s). It is renamed to %s", step, fault, aside.name)
    accelerator.wait_for_everyone()


def save_checkpoint(
    folder: Path, model: nn.Module, optimizer: Any, step: int, state: dict[str, Any], accelerator: Accelerator
) -> None:
    """Write `step_*/` atomically, then delete all but the two newest. All processes must call it.

    Args:
        folder: folder of the stage.
        model: its parameters are saved.
        optimizer: its state is saved.
        step: number of finished steps.
        state: data that JSON can store. `of` identifies the training.
        accelerator: of this process.

    Raises:
        RunError: the disk is full. The older checkpoint is not deleted.
    """
    target, sharded = folder / f"step_{step:06d}", is_sharded(model)
    if sharded or accelerator.is_main_process:
        write = _write_sharded if sharded else _write
        try:
            write(target, model, optimizer, {"step": step, **state}, accelerator)
        except (CheckpointException, Exception) as error:
            if not is_full(error.__cause__ or error):
                raise
            saved = checkpoints(folder)
            kept = f"{saved[-1].name} is kept, and training resumes from it" if saved else "No checkpoint was saved yet"
            hint = f"The disk is full. {kept}. Free some space and run the same command again."
            raise RunError("steps", str(target), hint) from None
    if accelerator.is_main_process:
        for old in checkpoints(folder)[:-_KEEP]:
            with staging(old) as hidden:  # `sweep` removes it if this process is killed
                old.rename(hidden / "outdated")
    accelerator.wait_for_everyone()


def _write(target: Path, model: nn.Module, optimizer: Any, state: dict[str, Any], accelerator: Accelerator) -> None:
    with new_folder(target) as folder:
        weights = {k: v.detach().cpu().contiguous() for k, v in _saved_parameters(model).items()}
        save_file(weights, folder / WEIGHTS)
        torch.save(optimizer.state_dict(), folder / OPTIMIZER)
        (folder / STATE).write_text(json.dumps(state))


def _saved_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters but those of 4 bits, which are quantized again from the stage's first weights."""
    return {name: p for name, p in model.named_parameters() if p.is_floating_point()}


def _write_sharded(
    target: Path, model: nn.Module, optimizer: Any, state: dict[str, Any], accelerator: Accelerator
) -> None:
    with _common_folder(target, accelerator) as folder:
        tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            moments: dict[str, Tensor] = optimizer.state.get(parameter, {})
            tensors |= {f"optimizer.{name}.{kind}": moment for kind, moment in moments.items()}
        dcp.save(tensors, checkpoint_id=folder / SHARDS)  # returns after all processes have written
        if accelerator.is_main_process:
            (folder / STATE).write_text(json.dumps(state))


@contextmanager
def _common_folder(target: Path, accelerator: Accelerator) -> Iterator[Path]:
    """Yield a new folder that all processes write into. The main process creates it, and renames it at the end."""
    if not accelerator.is_main_process:
        name: list[str | None] = [None]
        broadcast_object_list(name)
        yield Path(str(name[0]))
        return
    with new_folder(target) as folder:
        broadcast_object_list([str(folder)])
        yield folder


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: Any, identity: str, accelerator: Accelerator
) -> dict[str, Any] | None:
    """Load the newest checkpoint that can be read. All processes must call it.

    Args:
        folder: folder of the stage.
        model: its parameters are overwritten.
        optimizer: its state is overwritten.
        identity: must be equal to `of` in the state.
        accelerator: of this process.

    Returns:
        The state of the checkpoint; None if there is none.

    Raises:
        RunError: the checkpoint belongs to another training, or it has sharded weights and this launch has whole ones,
            or the reverse.
    """
    set_aside_broken(folder, accelerator)
    if not checkpoints(folder):
        return None
    newest = checkpoints(folder)[-1]
    state: dict[str, Any] = json.loads((newest / STATE).read_text(encoding="utf-8"))
    if state["of"] != identity:
        raise RunError("steps", str(newest), "It belongs to another training. Delete it, or set another folder.")
    was_sharded = (newest / SHARDS).is_dir()
    if was_sharded != is_sharded(model):
        kinds = ("sharded", "whole") if was_sharded else ("whole", "sharded")
        hint = f"Its weights are {kinds[0]}, but those of this launch are {kinds[1]}. Launch as before, or delete it."
        raise RunError("steps", str(newest), hint)
    (_read_sharded if was_sharded else _read)(newest, model, optimizer)
    return state


def _read(step: Path, model: nn.Module, optimizer: Any) -> None:
    weights = load_file(step / WEIGHTS)
    _check_names(step, weights.keys(), model)
    moments = torch.load(step / OPTIMIZER, weights_only=True, map_location="cpu")
    with torch.no_grad():
        for name, parameter in _saved_parameters(model).items():
            parameter.copy_(weights[name])
    optimizer.load_state_dict(moments)


def _read_sharded(step: Path, model: nn.Module, optimizer: Any) -> None:
    """Read a sharded checkpoint. The number of processes may differ from the one that wrote it."""
    parameters = dict(model.named_parameters())
    reader = ShardReader(step / SHARDS)
    saved = reader.read_metadata().state_dict_metadata
    _check_names(step, {key.removeprefix("model.") for key in saved if key.startswith("model.")}, model)
    tensors = {f"model.{name}": p.detach() for name, p in parameters.items()}
    for key in saved.keys() - tensors.keys():
        name, _, kind = key.removeprefix("optimizer.").rpartition(".")
        parameter = parameters[name]
        tensors[key] = torch.zeros(()) if kind == "step" else torch.zeros_like(parameter.detach())
        optimizer.state[parameter][kind] = tensors[key]
    dcp.load(tensors, storage_reader=reader)


def _check_names(step: Path, saved: Any, model: nn.Module) -> None:
    different = set(saved) ^ _saved_parameters(model).keys()
    if different:
        names = f"{min(different)} and {len(different) - 1} more"
        hint = f"It has other weights: {names}. Delete it, or set another folder."
        raise RunError("steps", str(step), hint)
