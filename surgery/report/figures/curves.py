"""Line plots: accuracy by number of pairs, losses by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from surgery.recipe.objectives import OBJECTIVES
from surgery.report.figures.canvas import (
    ARM_LOOKS,
    BLUE,
    GREEN,
    GREY,
    INK,
    MORE_LOOKS,
    MUTED,
    OCHRE,
    ORANGE,
    PURPLE,
    SKY,
    add_axes,
    add_heading,
    error_bars,
    label_ends,
    new_figure,
    save,
    style,
)
from surgery.report.results import ARM_LABELS

_TRAINED = {"training": "hybrid", "no_splice_training": ARM_LABELS["no_splice"]}  # arm by file name
_COLOURS = {"loss": INK, "answer": BLUE, "attention": ORANGE, "base_kl": GREEN, "lm": PURPLE}
_MORE_COLOURS = [OCHRE, SKY, GREY]
_NOT_LOSSES = ("step", "seconds", "tokens", "kv_accuracy", "last_step")
_Curves = Mapping[str, NDArray[np.float64]]


@style()
def accuracy_by_pairs(
    arms: Mapping[str, Mapping[str, Mapping[str, float]]],
    folder: Path,
    trained: tuple[int, int] | None = None,
    title: str = "Retrieval accuracy by number of pairs",
    labels: Mapping[str, str] = ARM_LABELS,
) -> list[Path]:
    """Draw accuracy against the number of pairs in the prompt, one line per arm: `accuracy_by_pairs.*`.

    Args:
        arms: arm -> number of pairs -> `accuracy`, `low`, `high` (0 to 1) and `n` prompts.
        trained: smallest and largest number of pairs in training; None if it had none.
        title: of the figure.
        labels: names of arms, by arm. Others keep their own name.

    Returns:
        The three paths.
    """
    table = {arm: sorted((int(k), v) for k, v in accuracies.items()) for arm, accuracies in arms.items()}
    numbers = sorted({k for points in table.values() for k, _ in points})
    longest = max(len(labels.get(arm, arm)) for arm in table)
    figure = new_figure(7.2 + 0.07 * max(0, longest - 20), 4.4)  # names are at the right
    note = f"KV-retrieval. Bars: 95% intervals, {_prompts(table)}. Dotted: chance, 1 / pairs."
    add_heading(figure, title, note)
    axes = add_axes(figure, 0.7, 0.85, 4.95, 3.0)
    _pairs_axes(axes, numbers, trained)
    extra = iter(MORE_LOOKS * len(table))
    edge = axes.get_xlim()[1]
    ends = [("chance", edge, 1 / edge, MUTED)]
    for shift, (arm, points) in enumerate(table.items()):
        name, (colour, marker) = labels.get(arm, arm), ARM_LOOKS.get(arm) or next(extra)
        # A small shift keeps the bars of arms apart where they agree.
        x = [k * 2 ** (0.035 * (shift - (len(table) - 1) / 2)) for k, _ in points]
        y = [v["accuracy"] for _, v in points]
        bars = error_bars([v for _, v in points])
        axes.errorbar(x, y, bars, color=colour, marker=marker, markersize=5, linewidth=1.8, elinewidth=1, capsize=2.5)
        ends.append((name, x[-1], y[-1], colour))
    label_ends(axes, ends, gap=0.065)
    rows = [[arm, k, v["accuracy"], v["low"], v["high"], v["n"]] for arm, points in table.items() for k, v in points]
    return save(figure, folder, "accuracy_by_pairs", ["arm", "pairs", "accuracy", "low", "high", "n"], rows)


def _prompts(table: Mapping[str, Sequence[tuple[int, Mapping[str, float]]]]) -> str:
    counts = sorted({int(v["n"]) for points in table.values() for _, v in points})
    return f"{counts[0]} prompts per point" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} prompts per point"


def _pairs_axes(axes: Axes, numbers: Sequence[int], trained: tuple[int, int] | None) -> None:
    """Set up a log axis with ticks at `numbers`, the range of training, and the chance level."""
    axes.set_xscale("log", base=2)
    least, greatest = trained or (numbers[0], numbers[-1])
    axes.set_xlim(min(numbers[0], least) / 2**0.25, max(numbers[-1], greatest) * 2**0.25)
    axes.set_ylim(0, 1.03)
    axes.set_xticks(list(numbers), [str(k) for k in numbers])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="minor", length=0)
    axes.set_xlabel("pairs in the prompt (log scale)")
    axes.set_ylabel("accuracy")
    axes.grid(axis="y")
    if trained is not None:
        span = "trained on " + " to ".join(str(k) for k in sorted(set(trained)))
        low, high = trained[0] / 2**0.1, trained[1] * 2**0.1
        axes.axvspan(low, high, color="#eef3f7", linewidth=0, zorder=0)
        axes.text(math.sqrt(low * high), 1.035, span, size=8, color=MUTED, ha="center", va="bottom")
    left, right = axes.get_xlim()
    x = np.geomspace(left, right, 60)
    axes.plot(x, 1 / x, color=MUTED, linewidth=1.1, linestyle=":")


@style()
def training_curve(history: Sequence[Mapping[str, float]], folder: Path, name: str = "training") -> list[Path]:
    """Draw the loss of each objective against the step: `NAME.*`.

    Args:
        history: for each step, `step` (from 1), the weighted loss of each objective and their sum `loss`. `seconds` and
            other measurements are not drawn. A step may lack an objective.

    Returns:
        The three paths.
    """
    keys = list(dict.fromkeys(key for entry in history for key in entry))
    losses = [key for key in keys if key not in _NOT_LOSSES]
    steps = np.array([entry["step"] for entry in history], dtype=np.float64)
    curves = _without_copy({key: np.array([entry.get(key, math.nan) for entry in history], float) for key in losses})
    reach = len(steps) // 40  # steps to either side that a point of the bold line averages
    smooth = {key: _smooth(curve, reach) for key, curve in curves.items()}
    figure = new_figure(7.2, 4.3)
    note = f"Bold: mean of {2 * reach + 1} steps. Light: each step." if reach else "Each step."
    note += (
        " Losses are multiplied by their weights; 'all' is their sum." if "loss" in curves and len(curves) > 1 else ""
    )
    add_heading(figure, f"Loss by objective: {_TRAINED.get(name, name.replace('_', ' '))}", note)
    axes = add_axes(figure, 0.75, 0.75, 5.1, 3.0)
    _loss_axes(axes, steps, curves, smooth)
    more = iter(_MORE_COLOURS * len(curves))
    ends = []
    for key, line in smooth.items():
        colour = _COLOURS.get(key) or next(more)
        if reach:
            axes.plot(steps, curves[key], color=colour, linewidth=0.6, alpha=0.3)
        axes.plot(steps, line, color=colour, linewidth=1.8, marker="o" if len(steps) <= 20 else "", markersize=3.5)
        last = int(np.flatnonzero(np.isfinite(line))[-1])
        label = OBJECTIVES[key].label if key in OBJECTIVES else key
        text = f"{'all' if key == 'loss' and len(curves) > 1 else label} {line[last]:.3g}"
        ends.append((text, steps[last], max(line[last], axes.get_ylim()[0]), colour))
    label_ends(axes, ends, gap=0.065)
    return save(figure, folder, name, keys, [[entry.get(key, "") for key in keys] for entry in history])


def _without_copy(curves: _Curves) -> _Curves:
    """Drop losses without a finite number, and the sum if there is only one objective."""
    shown = {key: curve for key, curve in curves.items() if np.isfinite(curve).any()}
    if len(shown) == 2 and "loss" in shown and len({curve.tobytes() for curve in shown.values()}) == 1:
        del shown["loss"]
    return shown


def _smooth(curve: NDArray[np.float64], reach: int) -> NDArray[np.float64]:
    """Centred mean over `reach` steps to either side, ignoring missing numbers; shorter at both ends."""
    kernel, inner = np.ones(2 * reach + 1), slice(reach, reach + len(curve))
    known = np.isfinite(curve)
    total = np.convolve(np.where(known, curve, 0.0), kernel)[inner]
    count = np.convolve(known.astype(np.float64), kernel)[inner]
    return np.where(known, total / np.maximum(count, 1), math.nan)


def _loss_axes(axes: Axes, steps: NDArray[np.float64], curves: _Curves, smooth: _Curves) -> None:
    """Set limits that contain the smoothed curves and nearly every step; log y axis from a factor of 30 on."""
    lines = np.concatenate([line[np.isfinite(line)] for line in smooth.values()])
    raw = np.concatenate([curve[np.isfinite(curve)] for curve in curves.values()])
    top = max(float(lines.max()), float(np.percentile(raw, 99.5))) or 1.0
    bottom = max(float(np.min(lines, where=lines > 0, initial=top)), top * 1e-4)
    if top / bottom > 30:
        axes.set_yscale("log", nonpositive="mask")
        axes.set_ylim(bottom / 1.6, top * 1.6)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(min(0.0, float(lines.min())), top * 1.08)
    margin = max(0.5, 0.01 * float(steps[-1] - steps[0]))
    axes.set_xlim(steps[0] - margin, steps[-1] + margin)
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats), log scale" if axes.get_yscale() == "log" else "loss (nats)")
    axes.grid(axis="y")
