"""Find the plateau of a training loss, and the step with which its stage then ends.

Both depend on the history and the recipe only, so a resumed training ends with the same step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from accelerate.utils import broadcast_object_list

from surgery.recipe import Train, TrainStage

LAST_STEP = "last_step"  # in the entry of the step after which a plateau was found: the number of the stage's last step


def is_at_plateau(history: Sequence[Mapping[str, float]], stage: TrainStage) -> bool:
    """Whether a plateau was found after the last step of a stage's history. The main process decides for all."""
    if stage.plateau is None or len(history) % stage.plateau.window:
        return False
    found = [find_plateau(history, stage) == len(history)]
    broadcast_object_list(found)
    return found[0]


def find_plateau(history: Sequence[Mapping[str, float]], stage: TrainStage) -> int | None:
    """Return the number of steps of a stage after which its loss was at a plateau.

    The loss is averaged over windows that do not overlap. A mean is an improvement if it is lower than the lowest one
    by more than `threshold`. The plateau is found after `patience` means without an improvement, but not before
    `min_steps` and the warm-up, and not before the first improvement: a loss at chance has not reached a plateau.

    Args:
        history: entries of the steps of this stage, each with its weighted losses.

    Returns:
        The number of steps, a multiple of `window`. None if there is no plateau yet, or if it is found too late to
        shorten the stage.
    """
    settings = stage.plateau
    assert settings is not None
    least = settings.least(stage.num_steps, stage.optimizer.warmup)
    losses = [entry[settings.monitor] for entry in history if settings.monitor in entry]
    best, has_improved, waited = None, False, 0
    for end in range(settings.window, len(losses) + 1, settings.window):
        mean = fmean(losses[end - settings.window : end])
        if best is None or mean < best * (1 - settings.threshold):
            best, has_improved, waited = mean, best is not None, 0
        elif has_improved:
            waited += 1
        if waited >= settings.patience and end >= least:
            return end if num_steps_from(end, stage) < stage.num_steps else None
    return None


def num_steps_from(plateau: int, stage: TrainStage) -> int:
    """Number of steps of a stage with a plateau after `plateau` steps: these, and with `wsd` the decay.

    The rates are those of a stage without `plateau` that has this number of steps.
    """
    return min(stage.num_steps, stage.end_after(plateau))


def stage_lengths(history: Sequence[Mapping[str, float]], section: Train) -> list[int]:
    """Number of steps of each stage: until its plateau if the history has one, otherwise the largest number."""
    ends = [int(entry[LAST_STEP]) for entry in history if LAST_STEP in entry]
    lengths, begin = [], 0
    for stage in section.sequence:
        longest = begin + stage.num_steps
        end = next((end for end in ends if begin < end <= longest), longest)
        lengths.append(end - begin)
        begin = end
    return lengths


def plateau_to_json(history: Sequence[Mapping[str, float]], section: Train) -> dict[str, dict[str, int]]:
    """Describe how many steps each stage was trained: content of `plateau.json`.

    Returns:
        By the name of the stage `steps`: their number, and `plateau`: the number of the step at which a plateau was
        found, counted through all stages as in the history. Without a plateau, this entry is missing.
    """
    found = {int(entry[LAST_STEP]): int(entry["step"]) for entry in history if LAST_STEP in entry}
    stages, end = {}, 0
    for stage, steps in zip(section.sequence, stage_lengths(history, section), strict=True):
        end += steps
        stages[stage.name] = {"steps": steps, **({"plateau": found[end]} if end in found else {})}
    return stages
