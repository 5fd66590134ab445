"""Checkpoints to resume from: `step_*/`, written atomically by the main process. The two newest are kept.

Each holds model.safetensors, optimizer.pt and state.json. Sharded tensors are gathered one at a time, so any number of
processes can resume. A checkpoint that cannot be read is renamed to `broken_step_*`, and the one before it is used.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from surgery.errors import RunError, summary
from surgery.files.atomic import delete, fingerprint, is_full, new_folder, staging, sweep
from surgery.recipe import Train
from surgery.train.sharded import full, sharded_like
from surgery.types import Graft

WEIGHTS, OPTIMIZER, STATE = "model.safetensors", "optimizer.pt", "state.json"
_KEEP = 2  # the newest, and one more in case that one cannot be read
_NOT_IN_IDENTITY = ("save_every", "control", "trackers", "check_every", "workers")  # keys that change no weights
_LOG = logging.getLogger(__name__)


def checkpoints(folder: Path) -> list[Path]:
    """List the `step_*` folders, oldest first."""
    folders = (p for p in folder.glob("step_*") if re.fullmatch(r"step_\d+", p.name))
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step_")))


def identity_of(model: nn.Module, section: Train, number: int, seed: int, grafts: Sequence[Graft] = ()) -> str:
    """Hash that identifies the training of a checkpoint. Later stages are no part of it, so they may change."""
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    data = section.model_dump(mode="json")
    if data["stages"]:
        data["stages"] = data["stages"][: number + 1]
    splice = [{**asdict(graft), "site": graft.site.name} for graft in grafts]
    return fingerprint([{k: v for k, v in data.items() if k not in _NOT_IN_IDENTITY}, number, seed, shapes, splice])


def save_checkpoint(
    folder: Path, model: nn.Module, optimizer: Any, step: int, state: dict[str, Any], accelerator: Accelerator
) -> None:
    """Write `step_*/` in the stage's folder atomically, then delete all but the two newest. All processes must call it.

    `step` is the number of finished steps. `state` is stored as JSON; its `of` identifies the training.

    Raises:
        RunError: the disk is full. The older checkpoint is not deleted.
    """

    def whole(tensor: Tensor) -> Tensor | None:
        gathered = full(tensor.detach())
        return gathered.cpu().contiguous() if accelerator.is_main_process else None

    weights = {name: whole(p) for name, p in _saved_parameters(model).items()}
    moments = tree_map_only(Tensor, whole, optimizer.state_dict())
    if accelerator.is_main_process:
        target = folder / f"step_{step:06d}"
        try:
            with new_folder(target) as new:
                save_file(weights, new / WEIGHTS)
                torch.save(moments, new / OPTIMIZER)
                (new / STATE).write_text(json.dumps({"step": step, **state}))
        except Exception as error:
            if not is_full(error.__cause__ or error):
                raise
            saved = checkpoints(folder)
            kept = f"{saved[-1].name} is kept, and training resumes from it" if saved else "No checkpoint was saved yet"
            hint = f"The disk is full. {kept}. Free some space and run the same command again."
            raise RunError("steps", str(target), hint) from None
        for old in checkpoints(folder)[:-_KEEP]:
            with staging(old) as hidden:  # `sweep` removes it if this process is killed
                old.rename(hidden / "outdated")
    accelerator.wait_for_everyone()


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: Any, identity: str, accelerator: Accelerator
) -> dict[str, Any] | None:
    """Load the newest checkpoint of the stage's folder that can be read. All processes must call it.

    Returns:
        The state of the checkpoint; None if there is none.

    Raises:
        RunError: the checkpoint belongs to another training: `of` of its state is not `identity`.
    """
    set_aside_broken(folder, accelerator)
    if not checkpoints(folder):
        return None
    newest = checkpoints(folder)[-1]
    state: dict[str, Any] = json.loads((newest / STATE).read_text(encoding="utf-8"))
    if state["of"] != identity:
        raise RunError("steps", str(newest), "It belongs to another training. Delete it, or set another folder.")
    parameters = _saved_parameters(model)
    with torch.no_grad(), safe_open(newest / WEIGHTS, "pt") as weights:
        different = set(weights.keys()) ^ parameters.keys()
        if different:
            names = f"{min(different)} and {len(different) - 1} more"
            hint = f"It has other weights: {names}. Delete it, or set another folder."
            raise RunError("steps", str(newest), hint)
        for name, parameter in parameters.items():
            parameter.copy_(sharded_like(weights.get_tensor(name), parameter))
    moments = _load_moments(newest / OPTIMIZER)
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, kinds in moments["state"].items():
        for kind in kinds.keys() - {"step"}:
            kinds[kind] = sharded_like(kinds[kind], trained[index]).clone()  # not backed by the file
    optimizer.load_state_dict(moments)
    return state


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


def fault_of(step: Path) -> str | None:
    """Describe what is wrong with the files of a `step_*` folder; None if they are intact.

    Reads headers, indexes and sizes, not the tensors. A truncated file is always detected.
    """
    name = STATE
    try:
        state = json.loads((step / STATE).read_text(encoding="utf-8"))
        if step.name != f"step_{state['step']:06d}" or not {"of", "history"} <= state.keys():
            raise ValueError(f"it belongs to step {state['step']}")
        name = WEIGHTS
        with safe_open(step / WEIGHTS, "pt"):  # checks that the header accounts for every byte
            pass
        name = OPTIMIZER
        if not {"state", "param_groups"} <= _load_moments(step / OPTIMIZER).keys():
            raise ValueError("it holds no optimizer state")
    except FileNotFoundError:
        return f"{name} is missing"
    except (MemoryError, PermissionError):
        raise
    except Exception as error:  # json, safetensors, torch and pickle raise many types for a damaged file
        return f"{name}: {summary(error)}"
    return None


def _load_moments(file: Path) -> Any:
    """Load the optimizer's state without reading it into memory. Its pickle may hold tensors and plain data only."""
    return torch.load(file, weights_only=True, map_location="cpu", mmap=True)


def _saved_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters but those of 4 bits, which are quantized again from the stage's first weights."""
    return {name: p for name, p in model.named_parameters() if p.is_floating_point()}
