"""Send losses to tensorboard, trackio or wandb, through Accelerate's trackers.

A tracker reads its settings, such as a project's name or a key, from its environment variables. They are never written
to the run folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import LoggerType

from surgery.errors import RecipeError
from surgery.files.atomic import check_links


def check_trackers(names: Sequence[str]) -> None:
    """Check that the packages of trackers are installed.

    Raises:
        RecipeError: one is not.
    """
    for name in names:
        if find_spec(name) is None:
            raise RecipeError("train.trackers", name, f"It is not installed. Run pip install {name}.")


@contextmanager
def tracked(
    accelerator: Accelerator, names: Sequence[str], folder: Path, config: Mapping[str, Any]
) -> Iterator[Accelerator]:
    """Open trackers for the training inside.

    Args:
        accelerator: the trackers are attached to it.
        names: names of trackers, such as `tensorboard`.
        folder: folder of trackers that write files.
        config: settings to log; values must be plain.

    Raises:
        RecipeError: as `check_trackers`.
    """
    check_trackers(names)
    if names:
        check_links(folder)
        folder.mkdir(parents=True, exist_ok=True)
        accelerator.project_configuration.set_directories(str(folder))
        accelerator.log_with = [LoggerType(name) for name in names]
        accelerator.init_trackers("surgery", dict(config))
    try:
        yield accelerator
    finally:
        for tracker in accelerator.trackers if names else ():
            tracker.finish()
        if names:
            accelerator.trackers, accelerator.log_with = [], []


class SentEntries:
    """Sends each entry of a history to the trackers once. A resumed training sends no earlier one."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._count: int | None = None

    def log_new(self, entries: Sequence[Mapping[str, float]]) -> None:
        """Send the entries that were added since the last call; at the first one, the last entry."""
        first = len(entries) - 1 if self._count is None else self._count
        self._count = len(entries)
        if self.accelerator.trackers:
            for entry in entries[first:]:
                values = {f"train/{k}": v for k, v in entry.items() if k != "step"}
                self.accelerator.log(values, step=int(entry["step"]))
