"""Send losses to tensorboard, trackio or wandb, through Accelerate's trackers.

A tracker reads its settings, such as a project's name or a key, from its environment variables. They are never written
to the run folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import LoggerType

from surgery.errors import RecipeError
from surgery.files.atomic import check_links

Send = Callable[[Sequence[Mapping[str, float]]], None]


def check_trackers(names: Sequence[str]) -> None:
    """Raise RecipeError if the package of a tracker is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise RecipeError("train.trackers", name, f"It is not installed. Run pip install {name}.")


@contextmanager
def tracked(accelerator: Accelerator, names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> Iterator[Send]:
    """Open trackers for the training inside.

    Args:
        accelerator: the trackers are attached to it.
        names: names of trackers, such as `tensorboard`.
        folder: folder of trackers that write files.
        config: settings to log; values must be plain.

    Yields:
        A function that takes the history and sends each entry once. Its first call sends the last entry only, since a
        resumed training has sent the earlier ones before.
    """
    check_trackers(names)
    if not names:
        yield lambda entries: None
        return
    check_links(folder)
    folder.mkdir(parents=True, exist_ok=True)
    accelerator.project_configuration.set_directories(str(folder))
    accelerator.log_with = [LoggerType(name) for name in names]
    accelerator.init_trackers("surgery", dict(config))
    num_sent: int | None = None

    def send(entries: Sequence[Mapping[str, float]]) -> None:
        nonlocal num_sent
        for entry in entries[len(entries) - 1 if num_sent is None else num_sent :]:
            values = {f"train/{k}": v for k, v in entry.items() if k != "step"}
            accelerator.log(values, step=int(entry["step"]))
        num_sent = len(entries)

    try:
        yield send
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()
        accelerator.trackers, accelerator.log_with = [], []
