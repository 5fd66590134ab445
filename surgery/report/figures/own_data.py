"""Exact match on the user's held-out rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from surgery.report.figures.canvas import (
    ARM_LOOKS,
    INK,
    PURPLE,
    add_axes,
    add_heading,
    error_bars,
    new_figure,
    save,
    style,
)
from surgery.report.text import cut_middle

_ROW = 0.27  # inches


@style()
def held_out_accuracy(
    data: Mapping[str, Mapping[str, Mapping[str, float]]], labels: Mapping[str, str], folder: Path
) -> list[Path]:
    """Draw the share of held-out rows that each arm generates exactly, one panel per data set: `held_out_accuracy.*`.

    Args:
        data: data set -> arm -> `accuracy`, `low`, `high` (0 to 1) and `n` rows. Arms in the order to draw.
        labels: names of arms, by arm. Others keep their own name.

    Returns:
        The three paths.
    """
    longest = max(len(labels.get(arm, arm)) for arms in data.values() for arm in arms)
    left = 0.3 + 0.068 * longest
    heights = [_ROW * len(arms) + 0.75 for arms in data.values()]
    figure = new_figure(left + 5.3, 0.85 + sum(heights))
    add_heading(figure, "Held-out rows of your data", "Generated answers that match exactly. Bars: 95% intervals.")
    top = 0.95
    for (name, arms), height in zip(data.items(), heights, strict=True):
        axes = add_axes(figure, left, top, 4.4, _ROW * len(arms))
        top += height
        axes.set_ylim(len(arms) - 0.5, -0.5)
        axes.set_xlim(0, 1)
        axes.set_yticks(range(len(arms)), [labels.get(arm, arm) for arm in arms])
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        rows = int(max(entry["n"] for entry in arms.values()))
        axes.set_title(f"{cut_middle(name, 60)}, {rows} rows", size=9, loc="left", color=INK)
        for place, (arm, entry) in enumerate(arms.items()):
            colour, marker = ARM_LOOKS.get(arm, (PURPLE, "v"))
            value = entry["accuracy"]
            axes.errorbar([value], [place], xerr=error_bars([entry]), color=colour, marker=marker, markersize=6,
                          capsize=2.5, clip_on=False)  # fmt: skip
            axes.text(1.03, place, f"{100 * value:.1f}%", size=8.5, color=colour, va="center")
    cells = [
        [name, arm, *(entry[key] for key in _HEADER[2:])] for name, arms in data.items() for arm, entry in arms.items()
    ]
    return save(figure, folder, "held_out_accuracy", _HEADER, cells)


_HEADER = ["data", "arm", "accuracy", "low", "high", "n"]
