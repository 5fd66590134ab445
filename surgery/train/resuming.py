"""Find where the training of a stage continues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from surgery.files.atomic import fingerprint
from surgery.recipe import Train
from surgery.train.checkpoints import load_checkpoint, save_checkpoint
from surgery.types import Graft

_NOT_IN_IDENTITY = ("save_every", "control", "trackers", "check_every", "workers")  # keys that change no weights


def resume(
    folder: Path | None,
    student: PreTrainedModel,
    optimizer: Any,
    identity: str,
    accelerator: Accelerator,
    number: int,
    entries: list[dict[str, float]],
) -> tuple[int, list[dict[str, float]]]:
    """Load the newest checkpoint. Returns the number of finished steps and their entries.

    Args:
        identity: of `identity_of`.
    """
    if folder is None:
        return 0, entries
    state = load_checkpoint(folder, student, optimizer, identity, accelerator)
    if state is not None:
        return int(state["step"]), state["history"]
    if number:  # keep the result of the earlier stages
        save_checkpoint(folder, student, optimizer, 0, {"of": identity, "history": entries}, accelerator)
    return 0, entries


def identity_of(model: nn.Module, section: Train, number: int, seed: int, grafts: Sequence[Graft] = ()) -> str:
    """Hash that identifies the training of a checkpoint. Later stages are no part of it, so they may change."""
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    data = section.model_dump(mode="json")
    if data["stages"]:
        data["stages"] = data["stages"][: number + 1]
    splice = [{**asdict(graft), "site": graft.site.name} for graft in grafts]
    return fingerprint([{k: v for k, v in data.items() if k not in _NOT_IN_IDENTITY}, number, seed, shapes, splice])
