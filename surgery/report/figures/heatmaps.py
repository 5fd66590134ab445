"""Draw the scores of all heads as heat maps of layers by heads, one panel for each measured column.

Shape legend: C columns of scores, L layers that have heads, H heads (of the widest layer).
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.transforms import ScaledTranslation
from numpy.typing import NDArray

from surgery.recipe.methods import Column, all_columns, unit_of
from surgery.report.figures.canvas import INK, MUTED, POINTS, add_axes, add_heading, label_ends, new_figure, save, style
from surgery.report.heads_page import heads_table
from surgery.types import HeadSet

_LETTERS = {"gather": "G", "aggregate": "A", "both": "B"}
_EFFECTS = {"loss": "Margin lost when the head is removed or patched", "gain": "Margin gained with an oracle read"}
_PER_ROW = 3
_LEFT, _TOP, _GAP_Y = 0.6, 1.4, 1.2  # inches; `_GAP_Y` has room for ticks, row heading and panel titles
_LEGEND_HEIGHT = 2.65
_SMALL: Mapping[str, Any] = {"size": 5.5, "weight": "bold"}  # letters of roles, names in cells


@dataclass(frozen=True)
class _Layout:
    """Places of the heads in every panel.

    Attributes:
        heads: the scored heads.
        rows: name of a mixer -> its row. In a model that has both, attention heads have rows of their own.
        labels: of the rows: layer numbers, followed by A for attention heads.
        width: number of columns, H.
        cell: width and height of a cell in inches.
        has_numbers: each cell has room for its number.
    """

    heads: HeadSet
    rows: Mapping[str, int]
    labels: Sequence[str]
    width: int
    cell: tuple[float, float]
    has_numbers: bool

    def values_LH(self, column: Column) -> NDArray[np.float64]:
        """Scores of a column; NaN where a layer has fewer heads or nothing was measured."""
        values_LH = np.full((len(self.rows), self.width), np.nan)
        for scored in self.heads.heads:
            if column.name in scored.scores:
                values_LH[self.rows[scored.head.mixer], scored.head.head] = scored.scores[column.name].value
        return values_LH

    def limit(self, columns: Sequence[Column]) -> float:
        """End of a colour scale for these columns."""
        values_CLH = np.abs([self.values_LH(column) for column in columns])
        return float(np.nanmax(values_CLH, initial=0.0)) or 1.0


def panel_columns(head_set: HeadSet) -> list[Column]:
    """Columns to draw: all that were measured by a registered method."""
    measured = {name for scored in head_set.heads for name in scored.scores}
    return [column for name, column in all_columns().items() if name in measured]


@style()
def head_maps(head_set: HeadSet, folder: Path) -> list[Path]:
    """Draw every head in every column: `head_maps.png`, `.svg` and `.csv` in `folder`.

    Margins lost and gained share one colour scale. Other columns have one scale for each unit. Heads without a score
    get an empty cell.
    """
    layout = _layout(head_set)
    lines = [
        (heading if i == 0 else "", columns[i : i + _PER_ROW], limit)
        for heading, columns, limit in _groups(layout, panel_columns(head_set))
        for i in range(0, len(columns), _PER_ROW)
    ]
    legend_line = next((i for i, (_, columns, _) in enumerate(lines) if len(columns) < _PER_ROW), len(lines))
    width, height = layout.width * layout.cell[0], len(layout.rows) * layout.cell[1]
    pitch = width + (0.6 if layout.has_numbers else 1.1)  # names of chosen heads stand beside large maps
    tops = [_TOP]
    for i in range(max(len(lines), legend_line + 1)):
        tops.append(tops[-1] + max(height + _GAP_Y, _LEGEND_HEIGHT if i == legend_line else 0.0))
    full_width, full_height = _LEFT + _PER_ROW * pitch, tops[-1] - 0.65  # below the ticks of the last line
    figure = new_figure(full_width, full_height)
    note = "Each cell is one head. Margin: logit of the gold value minus the best other value, at the query."
    add_heading(figure, f"Retrieval scores of every head: {head_set.model}", note)
    for (heading, columns, limit), top in zip(lines, tops, strict=False):
        y = 1 - (top - 0.55) / full_height
        figure.text((_LEFT - 0.45) / full_width, y, heading, size=10, weight="bold", va="center")
        for place, column in enumerate(columns):
            _draw_panel(add_axes(figure, _LEFT + place * pitch, top, width, height), layout, column, limit)
    _draw_legend(figure, layout, _LEFT + 2 * pitch, tops[legend_line], min(width, 3.6))
    return save(figure, folder, "head_maps", *heads_table(head_set))


def _layout(head_set: HeadSet) -> _Layout:
    """Arrange the heads, and choose the size of the cells."""
    mixers = {s.head.mixer: (s.head.layer, s.head.letter == "A") for s in head_set.heads}
    in_order = sorted(mixers, key=lambda name: mixers[name])
    L, H = len(mixers), max(s.head.head for s in head_set.heads) + 1
    has_numbers = L <= 12 and H <= 16
    side = min(0.19, max(4.6 / H, 0.055))
    cell = (max(0.43, 3.0 / H), 0.37) if has_numbers else (max(side, 3.0 / H), min(side, 5.2 / L))
    labels = [f"{layer}{'A' * is_attention}" for layer, is_attention in (mixers[name] for name in in_order)]
    return _Layout(head_set, {name: row for row, name in enumerate(in_order)}, labels, H, cell, has_numbers)


def _groups(layout: _Layout, columns: Sequence[Column]) -> list[tuple[str, list[Column], float]]:
    """Heading, columns and end of the colour scale: columns with an effect on one scale, then the others by unit."""
    effects = [column for column in columns if column.effect]
    by_effect = {heading: [c for c in effects if c.effect == effect] for effect, heading in _EFFECTS.items()}
    groups = [(heading, of_kind, layout.limit(effects)) for heading, of_kind in by_effect.items() if of_kind]
    others = sorted((column for column in columns if not column.effect), key=lambda column: column.unit)
    for unit, of_unit in groupby(others, key=lambda column: column.unit):
        in_unit = list(of_unit)
        limit = layout.limit(in_unit)
        groups.append((f"{unit_of(unit).title}; colours from −{limit:.2g} to {limit:.2g}", in_unit, limit))
    return groups


def _draw_panel(axes: Axes, layout: _Layout, column: Column, limit: float) -> None:
    """Draw one column's heat map with its ticks and marks."""
    values_LH, (cell_width, cell_height) = layout.values_LH(column), layout.cell
    L, H = values_LH.shape
    axes.imshow(values_LH, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto", interpolation="none")
    note = textwrap.shorten(column.note, int((H * cell_width + 0.6) * 17), placeholder="…")  # at 8 points
    for text, points, looks in ((column.name, 17, {"size": 9.5, "weight": "bold"}), (note, 5, {"color": MUTED})):
        above = axes.transAxes + ScaledTranslation(0, points / POINTS, axes.figure.dpi_scale_trans)
        axes.text(0, 1, text, **{"size": 8, "transform": above, "va": "bottom", **looks})
    every = int(np.ceil(0.17 / cell_height))  # ticks are at least 0.17 inches apart
    axes.set_yticks(range(0, L, every), layout.labels[::every])
    axes.set_xticks(range(0, H, int(np.ceil(0.17 / cell_width))))
    axes.tick_params(labelsize=7.5, length=2, pad=2)
    axes.set_xlabel("head", size=8.5, labelpad=1)
    axes.set_ylabel("layer", size=8.5, labelpad=2)
    for spine in axes.spines.values():
        spine.set(visible=True, color="#bbbbbb", linewidth=0.6)
    if layout.has_numbers:
        _write_numbers(axes, layout, values_LH, limit)
    else:
        _write_names(axes, layout)
    pad_x, pad_y = (max(0.0, 0.04 - side / 10) / side for side in layout.cell)  # frames of small cells are larger
    for scored in layout.heads.chosen:
        corner = (scored.head.head - 0.5 - pad_x, layout.rows[scored.head.mixer] - 0.5 - pad_y)
        axes.add_patch(
            Rectangle(
                corner, 1 + 2 * pad_x, 1 + 2 * pad_y, fill=False, edgecolor=INK, linewidth=1.4, clip_on=False, zorder=3
            )
        )


def _write_numbers(axes: Axes, layout: _Layout, values_LH: NDArray[np.float64], limit: float) -> None:
    """Write each number, the letter of a head's role in the upper left corner, and a chosen head's name below."""
    digits = 1 if limit >= 10 else 2 if limit >= 0.1 else 3
    chosen = {scored.head for scored in layout.heads.chosen}
    for scored in layout.heads.heads:
        row, place = layout.rows[scored.head.mixer], scored.head.head
        value = values_LH[row, place]
        if np.isnan(value):
            continue
        ink = "white" if abs(value) > 0.6 * limit else INK
        number = f"{round(float(value), digits) + 0.0:.{digits}f}".replace("-", "−")
        axes.text(place, row, number, size=7, color=ink, ha="center", va="center")
        small = {**_SMALL, "color": ink}
        if scored.role in _LETTERS:
            axes.text(place - 0.42, row - 0.42, _LETTERS[scored.role], va="top", **small)
        if scored.head in chosen:
            axes.text(place, row + 0.43, str(scored.head), ha="center", va="bottom", **small)


def _write_names(axes: Axes, layout: _Layout) -> None:
    """Write letters of roles on cells without numbers, if they fit, and names of chosen heads beside the map."""
    if min(layout.cell) > 0.1:
        halo = [withStroke(linewidth=1.6, foreground="white")]
        for s in layout.heads.heads:
            if s.role in _LETTERS:
                place = (s.head.head, layout.rows[s.head.mixer])
                axes.text(*place, _LETTERS[s.role], ha="center", va="center", path_effects=halo, **_SMALL)
    ends = [(str(s.head), s.head.head, layout.rows[s.head.mixer], INK) for s in layout.heads.chosen]
    label_ends(axes, ends, gap=0.14 / (len(layout.rows) * layout.cell[1]))


def _draw_legend(figure: Figure, layout: _Layout, left: float, top: float, width: float) -> None:
    """Draw the colour bar and the legend of the marks in an empty panel. Left, top and width are in inches."""
    heads = layout.heads
    limit = layout.limit([column for column in panel_columns(heads) if column.effect])
    colours = ScalarMappable(Normalize(-limit, limit), "RdBu")
    bar = figure.colorbar(colours, cax=add_axes(figure, left, top, width, 0.14), orientation="horizontal")
    bar.ax.tick_params(labelsize=7.5, length=2, pad=2)
    bar.outline.set(linewidth=0.6, edgecolor="#bbbbbb")
    bar.ax.set_title("margin lost or gained, logits", size=8.5, loc="left", pad=4)
    prompts = max((score.n for s in heads.heads for score in s.scores.values()), default=0)
    clean = "".join(f", {name} {heads.clean[name].value:.2f}" for name in ("accuracy", "margin") if name in heads.clean)
    entries = (
        ("", "blue: margin lost by the change, or gained by the oracle read"),
        ("", "red: the opposite"),
        ("□", "chosen for splicing"),
        ("G", "Gather head: needed before the query"),
        ("A", "Aggregate head: needed at the query"),
        ("B", "both"),
        ("", f"clean model: {prompts} prompts{clean}"),
    )
    full_width, full_height = figure.get_size_inches()
    for line, (symbol, text) in enumerate(entries):
        y = 1 - (top + 0.52 + 0.22 * line) / full_height
        figure.text(left / full_width, y, symbol, size=9, weight="bold", va="center")
        figure.text((left + 0.22 * bool(symbol)) / full_width, y, text, size=8, color=INK, va="center")
