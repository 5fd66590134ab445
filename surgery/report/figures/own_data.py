"""Exact match on the user's held-out rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from surgery.report.figures.canvas import add_axes, add_heading, draw_intervals, looks_of, new_figure, save, style
from surgery.report.text import cut_middle

_ROW = 0.27  # inches
_HEADER = ["data", "arm", "accuracy", "low", "high", "n"]


@style()
def held_out_accuracy(
    data: Mapping[str, Mapping[str, Mapping[str, float]]], labels: Mapping[str, str], folder: Path
) -> list[Path]:
    """Draw the share of held-out rows that each arm generates exactly, one panel per data set: `held_out_accuracy.*`.

    Args:
        data: data set -> arm -> `accuracy`, `low`, `high` (0 to 1) and `n` rows. Arms in the order to draw.
        labels: names of arms, by arm. Others keep their own name.
    """
    longest = max(len(labels.get(arm, arm)) for arms in data.values() for arm in arms)
    left, top = 0.3 + 0.068 * longest, 0.95
    heights = [_ROW * len(arms) + 0.75 for arms in data.values()]
    figure = new_figure(left + 5.3, 0.85 + sum(heights))
    add_heading(figure, "Held-out rows of your data", "Generated answers that match exactly. Bars: 95% intervals.")
    for (name, arms), height in zip(data.items(), heights, strict=True):
        axes = add_axes(figure, left, top, 4.4, _ROW * len(arms))
        top += height
        axes.set(xlim=(0, 1), ylim=(len(arms) - 0.5, -0.5))
        axes.set_yticks(range(len(arms)), [labels.get(arm, arm) for arm in arms])
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        rows = int(max(entry["n"] for entry in arms.values()))
        axes.set_title(f"{cut_middle(name, 60)}, {rows} rows", size=9, loc="left")
        for place, (arm, look) in enumerate(looks_of(list(arms)).items()):
            draw_intervals(axes, [place], [arms[arm]], look, sideways=True)
            axes.text(1.03, place, f"{100 * arms[arm]['accuracy']:.1f}%", size=8.5, color=look[0], va="center")
    cells = [
        [name, arm, *(entry[key] for key in _HEADER[2:])] for name, arms in data.items() for arm, entry in arms.items()
    ]
    return save(figure, folder, "held_out_accuracy", _HEADER, cells)
