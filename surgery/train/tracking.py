"""Where losses go beside the run folder. Owns: tensorboard, trackio, wandb, through Accelerate's trackers.

Must never know: what is trained. A tracker's own settings, such as a project's name or a key, come from its
environment variables; nothing of them is written here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from surgery.errors import RecipeError

_NOT_LOGGED = ("step",)


@contextmanager
def tracked(
    accelerator: Accelerator, names: Sequence[str], folder: Path, config: Mapping[str, Any]
) -> Iterator[Accelerator]:
    """Trackers that are open inside.

    Args:
        folder: for those that write files.
        config: plain data of the recipe, one level deep.

    Raises:
        RecipeError: a tracker's package is not installed.
    """
    for name in names:
        if find_spec(name) is None:
            raise RecipeError("train.trackers", name, f"It is not installed: pip install {name}.")
    if names:
        folder.mkdir(parents=True, exist_ok=True)
        accelerator.project_configuration.set_directories(str(folder))
        accelerator.log_with = [_kind(name) for name in names]
        accelerator.init_trackers("surgery", dict(config))
    try:
        yield accelerator
    finally:
        for tracker in accelerator.trackers if names else ():
            tracker.finish()
        if names:
            accelerator.trackers, accelerator.log_with = [], []


def _kind(name: str) -> Any:
    from accelerate.utils import LoggerType

    return LoggerType(name)


def log(accelerator: Accelerator, step: int, entry: Mapping[str, float]) -> None:
    """One entry of the history."""
    if accelerator.trackers:
        accelerator.log({f"train/{k}": v for k, v in entry.items() if k not in _NOT_LOGGED}, step=step)
