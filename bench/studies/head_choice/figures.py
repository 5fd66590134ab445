"""Figure of the study: the regret of every chooser on every base, by the number of heads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.lines import Line2D

from bench.studies.head_choice.arms import COLUMNS
from bench.studies.head_choice.choosers import ROWS
from bench.studies.head_choice.tables import TITLES
from surgery.report.figures.canvas import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    MUTED,
    ORANGE,
    PURPLE,
    add_axes,
    add_heading,
    new_figure,
    save,
    style,
)
from surgery.types import Interval

GOALS = (2, 5)  # points: on four of five bases, and on any
_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, GREY)
_MARKS = dict(zip(COLUMNS, ("o", "s", "^", "D", "v"), strict=True))


@style()
def regret_by_chooser(
    regrets: Mapping[tuple[str, str], Mapping[str, Interval]], labels: Mapping[str, str], folder: Path
) -> list[Path]:
    """Draw one row for each chooser, and one mark for each base and number of heads: `regret.*`. Returns the paths.

    Args:
        regrets: (base, column) -> chooser -> regret in points. Only what was measured. Nothing is drawn if empty.
        labels: names of the bases, in order.
    """
    if not regrets:
        return []
    bases = [base for base in labels if any(place[0] == base for place in regrets)]
    colours = {base: _COLOURS[i % len(_COLOURS)] for i, base in enumerate(bases)}
    height = 0.42 * len(ROWS)
    figure = new_figure(7.4, height + 1.9)
    note = f"One mark for each base and number of heads ({len(regrets)} of {len(labels) * len(COLUMNS)} are measured); "
    note += "line: 95% interval over prompts.\nDotted: at most 2 points on four of five bases, 5 on any."
    add_heading(figure, "Regret: accuracy behind the best tried set of as many heads", note)
    axes = add_axes(figure, 1.9, 0.85, 3.9, height)
    rows = []
    for row, (name, chooser) in enumerate(ROWS.items()):
        for index, ((base, column), found) in enumerate(regrets.items()):
            interval = found[name]
            y = row + 0.3 * ((index + 0.5) / len(regrets) - 0.5) * 2
            axes.plot([interval.low, interval.high], [y, y], color=colours[base], linewidth=0.9, alpha=0.6)
            axes.plot(interval.value, y, _MARKS[column], color=colours[base], markersize=4)
            rows.append([chooser.label, base, column, interval.value, interval.low, interval.high, interval.n])
    for goal in GOALS:
        axes.axvline(goal, color=MUTED, linewidth=0.9, linestyle=":")
    axes.axvline(0, color=FAINT, linewidth=0.8, zorder=0)
    axes.set_yticks(range(len(ROWS)), [chooser.label for chooser in ROWS.values()])
    axes.set_ylim(len(ROWS) - 0.5, -0.5)
    axes.set_xlabel("regret (points of accuracy)")
    axes.tick_params(axis="y", length=0)
    kinds = [Line2D([], [], color=colours[base], marker="o", linestyle="", markersize=4, label=base) for base in bases]
    columns = [column for column in COLUMNS if any(place[1] == column for place in regrets)]
    kinds += [Line2D([], [], color=INK, marker=_MARKS[c], linestyle="", markersize=4, label=TITLES[c]) for c in columns]
    axes.legend(handles=kinds, loc="upper left", bbox_to_anchor=(1.02, 1.0), fontsize=8)
    return save(figure, folder, "regret", ["chooser", "base", "column", "regret", "low", "high", "seeds"], rows)
