"""Draw the scores of all heads as heat maps of layers by heads, one panel for each measured column.

Shape legend: C columns of scores, L layers that have heads, H heads (of the widest layer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.transforms import ScaledTranslation
from numpy.typing import NDArray

from surgery.recipe import Locate
from surgery.recipe.methods import METHODS, Column, all_columns, unit_of
from surgery.report.figures.canvas import INK, MUTED, POINTS, add_axes, add_heading, new_figure, save, style
from surgery.report.heads_page import heads_table
from surgery.types import HeadSet

Point = NDArray[np.float64]  # (x, y)

_LETTERS = {"gather": "G", "aggregate": "A", "both": "B", "neither": "", "unmeasured": ""}
_PER_ROW = 3
_LEFT, _TOP, _GAP_X, _GAP_Y = 0.6, 1.4, 0.6, 1.2  # inches; `_GAP_Y` has room for ticks, row heading and panel titles
_LEGEND_HEIGHT = 2.0


@dataclass(frozen=True)
class _Group:
    """Panels under one heading with a common colour scale.

    Attributes:
        limit: end of the colour scale.
    """

    heading: str
    columns: tuple[Column, ...]
    limit: float


@dataclass(frozen=True)
class _Map:
    """Values of a map, and the layout of its panels.

    Attributes:
        values_CLH: in the units of the columns; NaN if a layer has fewer heads or nothing was measured.
        names: names of the columns.
        layers: labels of the rows: layer numbers, followed by A for attention heads in a model that also has SSM heads.
        cell: width and height of a cell in inches.
        marks: (row, head, letter) of heads with a role.
        chosen: (row, head, name) of chosen heads.
    """

    values_CLH: NDArray[np.float64]
    names: tuple[str, ...]
    layers: tuple[str, ...]
    cell: tuple[float, float]
    marks: tuple[tuple[int, int, str], ...]
    chosen: tuple[tuple[int, int, str], ...]

    @property
    def is_small(self) -> bool:
        return _is_small(*self.values_CLH.shape[1:])

    @property
    def aside(self) -> float:
        """Offset of a role's letter from its head, in cells: a letter would hide the colour of a tiny cell."""
        return 0.0 if min(self.cell) > 0.1 else 1.0

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of a panel, inches."""
        return self.values_CLH.shape[2] * self.cell[0], self.values_CLH.shape[1] * self.cell[1]

    def values_LH(self, column: Column) -> NDArray[np.float64]:
        return np.asarray(self.values_CLH[self.names.index(column.name)])

    def limit(self, columns: Sequence[Column]) -> float:
        """The end of a colour scale for these columns."""
        values_CLH = np.abs([self.values_LH(column) for column in columns])
        return float(np.nanmax(values_CLH, initial=0.0)) or 1.0


def panel_columns(head_set: HeadSet) -> list[Column]:
    """Columns to draw: those of the default methods, and all others that were measured."""
    measured = {name for scored in head_set.heads for name in scored.scores}
    default = {column.name for method in Locate().methods for column in METHODS[method].columns}
    return [column for name, column in all_columns().items() if name in default | measured]


@style()
def head_maps(head_set: HeadSet, folder: Path) -> list[Path]:
    """Draw every head in every column: `head_maps.png`, `.svg` and `.csv` in `folder`.

    Margins lost and gained share one colour scale. Other columns have one scale for each unit. Columns of the default
    methods that were not measured get an empty panel with a note. Heads without a score get an empty cell.

    Returns:
        The three paths.
    """
    columns = panel_columns(head_set)
    heads = _layout(head_set, columns)
    rows = [
        (group, group.columns[i : i + _PER_ROW], group.heading if i == 0 else "")
        for group in _groups(heads, columns)
        for i in range(0, len(group.columns), _PER_ROW)
    ]
    legend_row = next((r for r, (_, panels, _) in enumerate(rows) if len(panels) < _PER_ROW), len(rows))
    width, height = heads.size
    tops = [_TOP]
    for row in range(max(len(rows), legend_row + 1)):
        needed = _LEGEND_HEIGHT + 0.65 if row == legend_row else 0.0
        tops.append(tops[-1] + max(height + _GAP_Y, needed))
    bottom = tops[-1] - 0.65  # below the ticks of the last row
    full = (_LEFT + _PER_ROW * (width + _GAP_X), bottom)
    figure = new_figure(*full)
    note = "Each cell is one head. Margin: logit of the gold value minus the best other value, at the query."
    add_heading(figure, f"Retrieval scores of every head: {head_set.model}", note)
    image = None
    for (group, panels, heading), top in zip(rows, tops, strict=False):
        figure.text((_LEFT - 0.45) / full[0], 1 - (top - 0.55) / full[1], heading, size=10, weight="bold", va="center")
        for place, column in enumerate(panels):
            axes = add_axes(figure, _LEFT + place * (width + _GAP_X), top, width, height)
            panel = _panel(axes, heads, column, group.limit)
            image = panel if image is None else image
    _legend(figure, image, head_set, _LEFT + 2 * (width + _GAP_X), tops[legend_row], width)
    return save(figure, folder, "head_maps", *heads_table(head_set))


def _groups(heads: _Map, columns: Sequence[Column]) -> list[_Group]:
    """Columns with an effect, on one scale; then the others by unit."""
    effects = [column for column in columns if column.effect]
    limit = heads.limit(effects)
    headings = {"loss": "Margin lost when the head is removed or patched", "gain": "Margin gained with an oracle read"}
    groups = []
    for effect, heading in headings.items():
        of_kind = tuple(column for column in effects if column.effect == effect)
        if of_kind:
            groups.append(_Group(heading, of_kind, limit))
    others = sorted((column for column in columns if not column.effect), key=lambda column: column.unit)
    for unit, in_unit in groupby(others, key=lambda column: column.unit):
        of_unit = tuple(in_unit)
        limit = heads.limit(of_unit)
        heading = f"{unit_of(unit).title}; colours from −{limit:.2g} to {limit:.2g}"
        groups.append(_Group(heading, of_unit, limit))
    return groups


def _is_small(layers: int, heads: int) -> bool:
    """Return whether each cell has room for its number."""
    return layers <= 12 and heads <= 16


def _layout(head_set: HeadSet, columns: Sequence[Column]) -> _Map:
    """Arrange the values, and choose the size of the cells."""
    mixers = {s.head.mixer: (s.head.layer, s.head.letter == "A") for s in head_set.heads}
    in_order = sorted(mixers, key=lambda name: mixers[name])
    layers = tuple(f"{mixers[name][0]}{'A' if mixers[name][1] else ''}" for name in in_order)
    rows = {name: row for row, name in enumerate(in_order)}
    names = tuple(column.name for column in columns)
    num_heads = max(s.head.head for s in head_set.heads) + 1
    values_CLH = np.full((len(columns), len(layers), num_heads), np.nan)
    for scored in head_set.heads:
        for c, name in enumerate(names):
            if name in scored.scores:
                values_CLH[c, rows[scored.head.mixer], scored.head.head] = scored.scores[name].value
    if _is_small(len(layers), num_heads):
        cell = (max(0.43, 3.0 / num_heads), 0.37)
    else:
        side = min(0.19, max(4.6 / num_heads, 0.055))
        cell = (max(side, 3.0 / num_heads), min(side, 5.2 / len(layers)))
    marks = tuple((rows[s.head.mixer], s.head.head, _LETTERS[s.role]) for s in head_set.heads if _LETTERS[s.role])
    chosen = tuple((rows[s.head.mixer], s.head.head, str(s.head)) for s in head_set.chosen)
    return _Map(values_CLH, names, layers, cell, marks, chosen)


def _panel(axes: Axes, heads: _Map, column: Column, limit: float) -> Any:
    """Draw one column's heat map with its ticks and marks, and return the image, for the colour bar."""
    values_LH = heads.values_LH(column)
    L, H = values_LH.shape
    norm = Normalize(-limit, limit)
    image = axes.imshow(values_LH, cmap="RdBu", norm=norm, aspect="auto", interpolation="none")
    axes.text(0, 1, column.name, transform=_above(axes, 17), size=9.5, weight="bold", va="bottom")
    axes.text(0, 1, _shortened(column.note, heads.size[0]), transform=_above(axes, 5), size=8, color=MUTED, va="bottom")
    axes.set_xticks(_sparse(H, heads.cell[0]))
    ticks = _sparse(L, heads.cell[1])
    axes.set_yticks(ticks, [heads.layers[i] for i in ticks])
    axes.tick_params(labelsize=7.5, length=2, pad=2)
    axes.set_xlabel("head", size=8.5, labelpad=1)
    axes.set_ylabel("layer", size=8.5, labelpad=2)
    for spine in axes.spines.values():
        spine.set(visible=True, color="#bbbbbb", linewidth=0.6)
    if np.isnan(values_LH).all():
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, size=9, color=MUTED, ha="center", va="center")
        return image
    if heads.is_small:
        _write_cells(axes, values_LH, heads, limit)
    else:
        _write_marks(axes, heads)
    for row, head, _ in heads.chosen:
        axes.add_patch(_outline(head, row, heads.cell))
    return image


def _shortened(note: str, inches: float) -> str:
    """Truncate a note to fit above a panel, at 8 points."""
    most = int((inches + _GAP_X) * 17)
    return note if len(note) <= most else note[: note.rfind(" ", 0, most - 1)] + "…"


def _above(axes: Axes, points: float) -> Any:
    """Axes coordinates, moved up by `points`."""
    return axes.transAxes + ScaledTranslation(0, points / POINTS, axes.figure.dpi_scale_trans)


def _sparse(count: int, inches: float) -> list[int]:
    """Indices of the ticks: every n-th one, so that labels are at least 0.17 inches apart."""
    step = next(n for n in (1, 2, 4, 5, 8, 10, 16, 20, 50, 100, count) if n * inches >= 0.17 or n >= count)
    return list(range(0, count, step))


def _write_cells(axes: Axes, values_LH: NDArray[np.float64], heads: _Map, limit: float) -> None:
    """Write the number in each cell, the letter of its role in the upper left corner, a chosen head's name below."""
    digits = 1 if limit >= 10 else 2 if limit >= 0.1 else 3
    names = {(row, head): name for row, head, name in heads.chosen}
    letters = {(row, head): text for row, head, text in heads.marks}
    for (row, head), value in np.ndenumerate(values_LH):
        if np.isnan(value):
            continue
        ink = "white" if abs(value) > 0.6 * limit else INK
        text = f"{round(float(value), digits) + 0.0:.{digits}f}".replace("-", "−")
        axes.text(head, row, text, size=7, color=ink, ha="center", va="center")
        if (row, head) in letters:
            axes.text(head - 0.42, row - 0.42, letters[row, head], size=5.5, weight="bold", color=ink, va="top")
        if (row, head) in names:
            axes.text(head, row + 0.43, names[row, head], size=5.5, weight="bold", color=ink, ha="center", va="bottom")


def _write_marks(axes: Axes, heads: _Map) -> None:
    """Write letters of roles on cells that are too small for numbers, and names next to the cells of chosen heads."""
    halo = [withStroke(linewidth=1.6, foreground="white")]
    for row, head, text in heads.marks:
        axes.text(
            head + heads.aside,
            row - heads.aside,
            text,
            size=5.5,
            weight="bold",
            ha="center",
            va="center",
            path_effects=halo,
        )
    for (row, head, name), offset in zip(heads.chosen, _offsets(heads), strict=True):
        axes.annotate(
            name,
            xy=(head, row),
            xytext=offset,
            textcoords="offset points",
            size=7,
            weight="bold",
            ha="center",
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.8},
            arrowprops={
                "arrowstyle": "-",
                "linewidth": 0.7,
                "color": INK,
                "shrinkA": 0,
                "shrinkB": POINTS * min(heads.cell) / 2,
            },
        )


def _offsets(heads: _Map) -> list[tuple[float, float]]:
    """Place each chosen head's name inside the panel without overlap. Offsets from its cell are in points."""
    cell, panel = np.array(heads.cell) * POINTS, np.array(heads.size) * POINTS
    centres = [np.array([head + 0.5, row + 0.5]) * cell for row, head, _ in heads.chosen]  # y downwards
    letters = [np.array([head + 0.5 + heads.aside, row + 0.5 - heads.aside]) * cell for row, head, _ in heads.marks]
    taken = [(centre, cell / 2 + 1) for centre in centres] + [(letter, np.full(2, 3.0)) for letter in letters]
    ring = [(0, -1), (1, -1), (-1, -1), (0, 1), (1, 1), (-1, 1), (1, 0), (-1, 0)]
    offsets = []
    for (_, _, name), centre in zip(heads.chosen, centres, strict=True):
        half = np.array([2.6 * len(name) + 1, 5.5])
        options = [np.array(d) * (half + cell / 2 + reach) for reach in (4, 12, 22, 34) for d in ring]
        options = _outwards(options, centre, centres)
        fits = (
            o
            for o in options
            if np.all(centre + o - half >= 0)
            and np.all(centre + o + half <= panel)
            and all(np.any(np.abs(centre + o - other) >= half + size) for other, size in taken)
        )
        offset = next(fits, options[0])
        taken.append((centre + offset, half))
        offsets.append((float(offset[0]), float(-offset[1])))
    return offsets


def _outwards(options: Sequence[Point], centre: Point, centres: Sequence[Point]) -> list[Point]:
    """Sort offsets by length, and prefer those that point away from neighbours, so that lines do not cross."""
    near = [c for c in centres if float(np.linalg.norm(c - centre)) < POINTS]
    away = centre - np.mean(near, axis=0)
    away = away / (float(np.linalg.norm(away)) or 1.0)

    def cost(offset: Point) -> float:
        length = float(np.linalg.norm(offset))
        return length * (1.6 - float(offset @ away) / length)

    return sorted(options, key=cost)


def _outline(head: float, row: float, cell: tuple[float, float]) -> Rectangle:
    """The frame of a chosen head, a little larger than a small cell."""
    pad_x, pad_y = (max(0.0, 0.04 - side / 10) / side for side in cell)
    size = (1 + 2 * pad_x, 1 + 2 * pad_y)
    corner = (head - 0.5 - pad_x, row - 0.5 - pad_y)
    return Rectangle(
        corner, *size, fill=False, edgecolor=INK, linewidth=1.4 if min(cell) > 0.1 else 1.0, clip_on=False, zorder=3
    )


def _legend(figure: Figure, image: Any, head_set: HeadSet, left: float, top: float, width: float) -> None:
    """Draw the colour bar and the legend of the marks in an empty panel. Left, top and width are in inches."""
    bar = figure.colorbar(image, cax=add_axes(figure, left, top, min(width, 3.6), 0.14), orientation="horizontal")
    bar.ax.tick_params(labelsize=7.5, length=2, pad=2)
    bar.outline.set(linewidth=0.6, edgecolor="#bbbbbb")
    bar.ax.set_title("margin lost or gained, logits", size=8.5, loc="left", pad=4)
    prompts = max(s.n for s in head_set.heads)
    clean = "".join(
        f", {name} {head_set.clean[name].value:.2f}" for name in ("accuracy", "margin") if name in head_set.clean
    )
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
