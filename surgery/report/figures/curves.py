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
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PURPLE,
    add_axes,
    add_heading,
    draw_intervals,
    label_ends,
    log2_ticks,
    looks_of,
    new_figure,
    save,
    style,
)
from surgery.report.results import ARM_LABELS

_TRAINED = {"training": "hybrid", "no_splice_training": ARM_LABELS["no_splice"]}  # arm by file name
_LOSSES = {
    name: (colour, "o")
    for name, colour in {"loss": INK, "answer": BLUE, "attention": ORANGE, "base_kl": GREEN, "lm": PURPLE}.items()
}
_NOT_LOSSES = ("step", "seconds", "tokens", "kv_accuracy", "last_step")


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
        labels: names of arms, by arm. Others keep their own name.
    """
    table = {arm: sorted((int(k), v) for k, v in accuracies.items()) for arm, accuracies in arms.items()}
    numbers = sorted({k for points in table.values() for k, _ in points})
    counts = sorted({int(v["n"]) for points in table.values() for _, v in points})
    prompts = " to ".join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))
    longest = max(len(labels.get(arm, arm)) for arm in table)
    figure = new_figure(7.2 + 0.07 * max(0, longest - 20), 4.4)  # names are at the right
    note = f"KV-retrieval. Bars: 95% intervals, {prompts} prompts per point. Dotted: chance, 1 / pairs."
    add_heading(figure, title, note)
    axes = add_axes(figure, 0.7, 0.85, 4.95, 3.0)
    log2_ticks(axes, numbers)
    all_numbers = [*numbers, *(trained or ())]
    left, right = min(all_numbers) / 2**0.25, max(all_numbers) * 2**0.25
    axes.set(xlim=(left, right), ylim=(0, 1.03), xlabel="pairs in the prompt (log scale)", ylabel="accuracy")
    axes.grid(axis="y")
    if trained is not None:
        low, high = trained[0] / 2**0.1, trained[1] * 2**0.1
        axes.axvspan(low, high, color="#eef3f7", linewidth=0, zorder=0)
        span = "trained on " + " to ".join(str(k) for k in dict.fromkeys(trained))
        axes.text(math.sqrt(low * high), 1.035, span, size=8, color=MUTED, ha="center", va="bottom")
    x = np.geomspace(left, right, 60)
    axes.plot(x, 1 / x, color=MUTED, linewidth=1.1, linestyle=":")
    ends = [("chance", right, 1 / right, MUTED)]
    for shift, (arm, look) in enumerate(looks_of(list(table)).items()):
        # A small shift keeps the bars of arms apart where they agree.
        places = [k * 2 ** (0.035 * (shift - (len(table) - 1) / 2)) for k, _ in table[arm]]
        draw_intervals(axes, places, [v for _, v in table[arm]], look, joined=True)
        ends.append((labels.get(arm, arm), places[-1], table[arm][-1][1]["accuracy"], look[0]))
    label_ends(axes, ends)
    rows = [[arm, k, v["accuracy"], v["low"], v["high"], v["n"]] for arm, points in table.items() for k, v in points]
    return save(figure, folder, "accuracy_by_pairs", ["arm", "pairs", "accuracy", "low", "high", "n"], rows)


@style()
def training_curve(history: Sequence[Mapping[str, float]], folder: Path, name: str = "training") -> list[Path]:
    """Draw the loss of each objective against the step: `NAME.*`.

    For each step, `history` has `step` (from 1), the weighted loss of each objective and their sum `loss`. `seconds`
    and other measurements are not drawn. A step may lack an objective.
    """
    keys = list(dict.fromkeys(key for entry in history for key in entry))
    steps = np.array([entry["step"] for entry in history], dtype=np.float64)
    curves = {
        key: np.array([entry.get(key, math.nan) for entry in history], dtype=np.float64)
        for key in keys
        if key not in _NOT_LOSSES
    }
    curves = {key: curve for key, curve in curves.items() if np.isfinite(curve).any()}
    if len(curves) == 2 and "loss" in curves and len({curve.tobytes() for curve in curves.values()}) == 1:
        del curves["loss"]  # the sum of one objective
    has_sum = "loss" in curves and len(curves) > 1
    reach = len(steps) // 40  # steps to either side that a point of the bold line averages
    # A stage with other objectives has another sum: cut where one begins or ends.
    known = [np.flatnonzero(np.isfinite(curve)) for curve in curves.values()]
    borders = sorted({0, len(steps), *(int(border) for k in known for border in (k[0], k[-1] + 1))})[1:-1]
    smooth = {
        key: np.concatenate([_smooth(part, reach) for part in np.split(curve, borders)])
        for key, curve in curves.items()
    }
    figure = new_figure(7.2, 4.3)
    note = f"Bold: mean of {2 * reach + 1} steps. Light: each step." if reach else "Each step."
    note += " Losses are multiplied by their weights; 'all' is their sum." if has_sum else ""
    add_heading(figure, f"Loss by objective: {_TRAINED.get(name, name.replace('_', ' '))}", note)
    axes = add_axes(figure, 0.75, 0.75, 5.1, 3.0)
    _loss_axes(axes, steps, list(curves.values()), list(smooth.values()))
    ends = []
    for key, (colour, marker) in looks_of(list(curves), _LOSSES).items():
        line = smooth[key]
        if reach:
            axes.plot(steps, curves[key], color=colour, linewidth=0.6, alpha=0.3)
        axes.plot(steps, line, color=colour, linewidth=1.8, marker=marker if len(steps) <= 20 else "", markersize=3.5)
        last = float(line[np.isfinite(line)][-1])
        label = "all" if key == "loss" and has_sum else OBJECTIVES[key].label if key in OBJECTIVES else key
        ends.append((f"{label} {last:.3g}", steps[-1], max(last, axes.get_ylim()[0]), colour))
    label_ends(axes, ends)
    return save(figure, folder, name, keys, [[entry.get(key, "") for key in keys] for entry in history])


def _smooth(curve: NDArray[np.float64], reach: int) -> NDArray[np.float64]:
    """Centred mean over `reach` steps to either side, ignoring missing numbers; shorter at both ends."""
    kernel, inner = np.ones(2 * reach + 1), slice(reach, reach + len(curve))
    known = np.isfinite(curve)
    total = np.convolve(np.where(known, curve, 0.0), kernel)[inner]
    count = np.convolve(known.astype(np.float64), kernel)[inner]
    return np.where(known, total / np.maximum(count, 1), math.nan)


def _loss_axes(
    axes: Axes, steps: NDArray[np.float64], curves: list[NDArray[np.float64]], smooth: list[NDArray[np.float64]]
) -> None:
    """Set limits that contain the smoothed curves and nearly every step; log y axis from a factor of 30 on."""
    lines, raw = (values[np.isfinite(values)] for values in (np.concatenate(smooth), np.concatenate(curves)))
    top = max(float(lines.max()), float(np.percentile(raw, 99.5))) or 1.0
    bottom = max(float(np.min(lines, where=lines > 0, initial=top)), top * 1e-4)
    is_log = top / bottom > 30
    if is_log:
        axes.set_yscale("log", nonpositive="mask")
        axes.set_ylim(bottom / 1.6, top * 1.6)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(min(0.0, float(lines.min())), top * 1.08)
    margin = max(0.5, 0.01 * float(steps[-1] - steps[0]))
    axes.set_xlim(steps[0] - margin, steps[-1] + margin)
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, steps=[1, 2, 5, 10]))
    axes.set(xlabel="step", ylabel="loss (nats), log scale" if is_log else "loss (nats)")
    axes.grid(axis="y")
