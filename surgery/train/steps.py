"""Checkpoints to resume from. Owns: `step_*/`, written whole, the newest kept. Must never know: losses, data."""

from __future__ import annotations

import errno
import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn

from surgery.errors import RunError
from surgery.rundir import new_folder, sweep


def checkpoints(folder: Path) -> list[Path]:
    """The `step_*` folders, oldest first."""
    return sorted(p for p in folder.glob("step_*") if re.fullmatch(r"step_\d+", p.name))


def save_step(
    folder: Path, model: nn.Module, optimizer: Any, step: int, state: dict[str, Any], accelerator: Accelerator
) -> None:
    """Writes `step_*/` whole, then drops the older ones. Every process calls it; the main one writes.

    Args:
        state: plain data; `of` in it names the training that this is a step of.

    Raises:
        RunError: the disk is full; the older checkpoint stays.
    """
    if accelerator.is_main_process:
        target = folder / f"step_{step:06d}"
        try:
            _write(target, model, optimizer, {"step": step, **state})
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise RunError("steps", str(target), _full(folder)) from None
        except Exception as error:  # safetensors' own error of a full disk
            if "os error 28" not in str(error).lower():
                raise
            raise RunError("steps", str(target), _full(folder)) from None
        for old in checkpoints(folder):
            if old != target:
                shutil.rmtree(old)
    accelerator.wait_for_everyone()


def _full(folder: Path) -> str:
    found = checkpoints(folder)
    kept = f"{found[-1].name} is kept, and the run goes on from there" if found else "No step was saved before"
    return f"The disk is full. {kept}. Make room, and start again."


def _write(target: Path, model: nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
    with new_folder(target) as folder:
        weights = {k: v.detach().cpu().contiguous() for k, v in model.named_parameters()}
        save_file(weights, folder / "model.safetensors")
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        (folder / "state.json").write_text(json.dumps(state))


def load_step(
    folder: Path, model: nn.Module, optimizer: Any, identity: str, accelerator: Accelerator
) -> dict[str, Any] | None:
    """Loads the newest checkpoint and returns its state; None if there is none.

    Raises:
        RunError: it belongs to another training.
    """
    if folder.exists() and accelerator.is_main_process:
        sweep(folder)
    accelerator.wait_for_everyone()
    found = checkpoints(folder)
    if not found:
        return None
    state: dict[str, Any] = json.loads((found[-1] / "state.json").read_text())
    if state["of"] != identity:
        hint = "It belongs to another training. Delete it, or name another folder."
        raise RunError("steps", str(found[-1]), hint)
    weights = load_file(found[-1] / "model.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    optimizer.load_state_dict(torch.load(found[-1] / "optimizer.pt", weights_only=True, map_location="cpu"))
    return state
