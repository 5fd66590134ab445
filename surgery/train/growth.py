"""Notices a loss that grows instead of falling. Owns: how much is too much. Must never know: models, files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from surgery.recipe import TrainStage

_WINDOW = 20  # steps that a loss has to stay high for
_FEW = 3  # steps whose mean has to be out of the question
_MAY_NOT_GROW = ("answer", "text", "distil")
_OF_TOKENS = (*_MAY_NOT_GROW, "keep")  # compare next-token distributions, in nats a token


def grown(history: Sequence[Mapping[str, float]], stage: TrainStage, vocab_size: int) -> str | None:
    """The objective that has grown, with its loss; None while training looks healthy.

    The first step's loss is that of the weights as they were, whatever the learning rates are: it is what later steps
    are held against. But steps differ in difficulty: one that happens to be easy says little about the next. So a loss
    counts as grown in three cases, all in nats a token where not said otherwise:

    - Worse than knowing nothing: the last three steps' mean is above log(vocabulary), what a uniform guess costs, and
      above twice the first step's. No draw of documents takes a model there that was better than guessing, and a
      pretraining that begins at a guess has twice that. Losses that have not been measured yet count as 0, so a single
      step fires if it makes the mean by itself: a last step at 512 does.
    - Never back: every one of the last 20 steps is above twice the first, and a nat above it. The easiest of 20 draws
      is as easy as the first nearly always, so only a worse model does this.
    - Growing since: the last 20 steps' weighted mean is above twice that of the first 20, and a nat above it.

    The last two need weights that are constant: sources that take turns differ in difficulty too. `keep` begins at 0
    and is to grow, so only the first case counts for it. Attention's losses are bounded, and `hidden` has no scale.

    Args:
        history: of the steps of this stage, each with its weighted objectives.
    """
    for name in _OF_TOKENS:
        scale = stage.distil.temperature**2 if name in ("keep", "distil") else 1.0
        first, recent = _nats(history, 0, stage, name), range(max(1, len(history) - _WINDOW), len(history))
        later = [loss for i in recent if (loss := _nats(history, i, stage, name)) is not None]
        worst = max(2 * (first or 0.0), scale * math.log(vocab_size))
        if sum(later[-_FEW:]) > _FEW * worst:
            return _message(name, max(later[-_FEW:]), first)
        if first is None or name not in _MAY_NOT_GROW or not _is_constant(stage, name):
            continue
        if len(later) == _WINDOW and min(later) > 2 * first + scale:
            return _message(name, later[-1], first)
        if len(history) >= 2 * _WINDOW:
            before, after = ([h[name] for h in part] for part in (history[:_WINDOW], history[-_WINDOW:]))
            if sum(after) > 2 * sum(before) + _WINDOW:
                return _message(name, sum(after) / _WINDOW, sum(before) / _WINDOW)
    return None


def _message(name: str, loss: float, first: float | None) -> str:
    return f"{loss:.3g} for {name}, {first or 0.0:.3g} at first"


def _nats(history: Sequence[Mapping[str, float]], step: int, stage: TrainStage, name: str) -> float | None:
    """An objective's loss at a step without its weights; None where it has none."""
    progress = step / max(1, stage.num_steps - 1)
    weight = sum(source.weights.at(progress).get(name, 0.0) for source in stage.sources)
    return history[step][name] / weight if weight and name in history[step] else None


def _is_constant(stage: TrainStage, name: str) -> bool:
    return all(s.weights.at(0.0).get(name) == s.weights.at(1.0).get(name) for s in stage.sources)
