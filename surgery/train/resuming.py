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
from surgery.recipe.section import keys_of_0_1
from surgery.recipe.sources import Weights
from surgery.train.checkpoints import load_checkpoint, save_checkpoint
from surgery.types import Graft

_NOT_IN_IDENTITY = (
    "save_every",
    "no_splice",
    "trackers",
    "check_every",
    "workers",
)  # keys of 0.1 that change no weights


def resume(
    folder: Path | None,
    student: PreTrainedModel,
    optimizer: Any,
    identities: Sequence[str],
    accelerator: Accelerator,
    number: int,
    entries: list[dict[str, float]],
) -> tuple[int, list[dict[str, float]]]:
    """Load the newest checkpoint. Returns the number of finished steps and their entries.

    Args:
        identities: of `identities_of`; a new checkpoint has the first one.
    """
    if folder is None:
        return 0, entries
    state = load_checkpoint(folder, student, optimizer, identities, accelerator)
    if state is not None:
        renamed = Weights.renamed  # checkpoints of 0.1 have the old names
        return int(state["step"]), [{renamed.get(k, k): v for k, v in entry.items()} for entry in state["history"]]
    if number:  # keep the result of the earlier stages
        save_checkpoint(folder, student, optimizer, 0, {"of": identities[0], "history": entries}, accelerator)
    return 0, entries


def identities_of(
    model: nn.Module, section: Train, number: int, seed: int, grafts: Sequence[Graft] = ()
) -> tuple[str, ...]:
    """Hashes that identify the training of a checkpoint. Later stages are no part of them, so they may change.

    Returns:
        The hash; with grafts, followed by that of version 0.1, which did not depend on them.
    """
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    data = keys_of_0_1(Train, section.model_dump(mode="json"))
    if data["stages"]:
        data["stages"] = data["stages"][: number + 1]
    identity = [{k: v for k, v in data.items() if k not in _NOT_IN_IDENTITY}, number, seed, shapes]
    splice = [{**asdict(graft), "site": graft.site.name} for graft in grafts]
    return (fingerprint([*identity, splice]), fingerprint(identity)) if splice else (fingerprint(identity),)
