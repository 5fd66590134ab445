"""The map of all heads. Owns: the picture of a HeadSet. Must never know: models, torch, how heads were measured.

Shape legend: C columns of measurements, L layers that have heads, H heads (of the widest layer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

from surgery.report.figures.canvas import INK, MUTED, POINTS, add_axes, add_heading, new_figure, require, save, style
from surgery.types import HeadId, HeadSet, ScoredHead

Point = NDArray[np.float64]  # (x, y)

# Panel title of each of `locate.COLUMNS` (a test compares the names; importing them would import torch).
PANELS = {
    "ablation": "removed at every token",
    "query": "removed at the query token alone",
    "context": "removed at every token but the query",
    "segment_end": "reads the end of the gold segment",
    "answer_token": "reads the gold value",
}
_LETTERS = {"gather": "G", "aggregate": "A", "both": "B", "neither": "", "unmeasured": ""}
_PER_ROW = 3
_LEFT, _TOP, _GAP_X, _GAP_Y = 0.6, 1.4, 0.6, 1.2  # inches; `_GAP_Y` holds ticks, row heading and panel titles
_LEGEND_HEIGHT = 2.0


@dataclass(frozen=True)
class _Map:
    """Values and where they are drawn.

    Attributes:
        values_CLH: logits; NaN where a layer has fewer heads, or where a column was not measured.
        layers: names of the rows: layer numbers, with an A where they are attention heads beside SSM heads.
        cell: width and height of a cell in inches.
        limit: end of the colour scale, in logits.
        marks: (row, head, letters) of heads with a role; `chosen`: (row, head, name).
    """

    values_CLH: NDArray[np.float64]
    layers: tuple[str, ...]
    cell: tuple[float, float]
    limit: float
    marks: tuple[tuple[int, int, str], ...]
    chosen: tuple[tuple[int, int, str], ...]

    @property
    def is_small(self) -> bool:
        return _is_small(*self.values_CLH.shape[1:])

    @property
    def aside(self) -> float:
        """Cells between a head and the letter of its role, which would hide the colour of a tiny cell."""
        return 0.0 if min(self.cell) > 0.1 else 1.0

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of a panel, inches."""
        return self.values_CLH.shape[2] * self.cell[0], self.values_CLH.shape[1] * self.cell[1]


@style()
def head_maps(head_set: HeadSet, folder: Path) -> list[Path]:
    """Draws every head in every column: `head_maps.png`, `.svg` and `.csv` in `folder`.

    One colour scale, in logits, serves all panels; columns that were not measured say so. Returns the paths written.

    Raises:
        SurgeryError: no heads, or a head without a column that others have.
    """
    found = _layout(head_set)
    width, height = found.size
    pitch = height + _GAP_Y
    full = (_LEFT + _PER_ROW * (width + _GAP_X), _TOP + pitch + max(height + 0.55, _LEGEND_HEIGHT))
    figure = new_figure(*full)
    note = "Each cell is one head: change of the answer margin (logit of the gold value minus the best other value)."
    add_heading(figure, f"Which heads retrieval hangs on: {head_set.model}", note)
    image = None
    for index, column in enumerate(PANELS):
        row, place = divmod(index, _PER_ROW)
        axes = add_axes(figure, _LEFT + place * (width + _GAP_X), _TOP + row * pitch, width, height)
        image = _panel(axes, found, index, column)
    for row, text in enumerate(("Margin lost when the head is removed", "Margin gained when the head reads perfectly")):
        y = 1 - (_TOP + row * pitch - 0.55) / full[1]
        figure.text((_LEFT - 0.45) / full[0], y, text, size=10, weight="bold", va="center")
    _legend(figure, image, head_set, _LEFT + 2 * (width + _GAP_X), _TOP + pitch, width)
    return save(figure, folder, "head_maps", _header(), _rows(head_set))


def _is_small(layers: int, heads: int) -> bool:
    """Whether each cell has room for its number."""
    return layers <= 12 and heads <= 16


def _layout(head_set: HeadSet) -> _Map:
    """Checks the HeadSet and finds the size of its cells."""
    require(bool(head_set.heads), "head_set.heads", "empty", "Give a HeadSet that holds every head; locate again.")
    mixers = {s.head.mixer: (s.head.layer, s.head.letter == "A") for s in head_set.heads}
    names = sorted(mixers, key=lambda name: mixers[name])
    layers = tuple(f"{mixers[name][0]}{'A' if mixers[name][1] else ''}" for name in names)
    rows = {name: row for row, name in enumerate(names)}
    num_heads = max(s.head.head for s in head_set.heads) + 1
    values_CLH = np.full((len(PANELS), len(layers), num_heads), np.nan)
    measured = {column for scored in head_set.heads for column in scored.scores}
    for scored in head_set.heads:
        for c, column in enumerate(PANELS):
            if column not in measured:
                continue
            require(column in scored.scores, f"scores of {scored.head}", f"no {column!r}", "Locate again.")
            values_CLH[c, rows[scored.head.mixer], scored.head.head] = scored.scores[column].value
    require(not np.isnan(values_CLH).all(), "head_set.heads", "no scores", "Locate again.")
    strangers = [s.head for s in head_set.chosen if s.head.mixer not in rows or s.head.head >= num_heads]
    require(not strangers, "head_set.chosen", str(strangers[:1]), "Chosen heads must be among the heads.")
    if _is_small(len(layers), num_heads):
        cell = (max(0.43, 3.0 / num_heads), 0.37)
    else:
        side = min(0.19, max(4.6 / num_heads, 0.055))
        cell = (max(side, 3.0 / num_heads), min(side, 5.2 / len(layers)))
    marks = tuple((rows[s.head.mixer], s.head.head, _LETTERS[s.role]) for s in head_set.heads if _LETTERS[s.role])
    chosen = tuple((rows[s.head.mixer], s.head.head, str(s.head)) for s in head_set.chosen)
    limit = float(np.nanmax(np.abs(values_CLH))) or 1.0
    return _Map(values_CLH, layers, cell, limit, marks, chosen)


def _panel(axes: Axes, found: _Map, index: int, column: str) -> Any:
    """One column's heat map with its ticks and marks; returns the image, for the colour bar."""
    values_LH = found.values_CLH[index]
    L, H = values_LH.shape
    norm = Normalize(-found.limit, found.limit)
    image = axes.imshow(values_LH, cmap="RdBu", norm=norm, aspect="auto", interpolation="none")
    axes.text(0, 1, column, transform=_above(axes, 17), size=9.5, weight="bold", va="bottom")
    axes.text(0, 1, PANELS[column], transform=_above(axes, 5), size=8, color=MUTED, va="bottom")
    axes.set_xticks(_sparse(H, found.cell[0]))
    ticks = _sparse(L, found.cell[1])
    axes.set_yticks(ticks, [found.layers[i] for i in ticks])
    axes.tick_params(labelsize=7.5, length=2, pad=2)
    axes.set_xlabel("head", size=8.5, labelpad=1)
    axes.set_ylabel("layer", size=8.5, labelpad=2)
    for spine in axes.spines.values():
        spine.set(visible=True, color="#bbbbbb", linewidth=0.6)
    if np.isnan(values_LH).all():
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, size=9, color=MUTED, ha="center", va="center")
        return image
    if found.is_small:
        _write_cells(axes, values_LH, found)
    else:
        _write_marks(axes, found)
    for row, head, _ in found.chosen:
        axes.add_patch(_outline(head, row, found.cell))
    return image


def _above(axes: Axes, points: float) -> Any:
    """Axes coordinates, moved up by `points`."""
    return axes.transAxes + ScaledTranslation(0, points / POINTS, axes.figure.dpi_scale_trans)


def _sparse(count: int, inches: float) -> list[int]:
    """Every n-th index, so that tick labels stand at least 0.17 inches apart."""
    step = next(n for n in (1, 2, 4, 5, 8, 10, 16, 20, 50, 100, count) if n * inches >= 0.17 or n >= count)
    return list(range(0, count, step))


def _write_cells(axes: Axes, values_LH: NDArray[np.float64], found: _Map) -> None:
    """The number in each cell; letters of its role above left, the name of a chosen head below."""
    digits = 1 if found.limit >= 10 else 2 if found.limit >= 0.1 else 3
    names = {(row, head): name for row, head, name in found.chosen}
    letters = {(row, head): text for row, head, text in found.marks}
    for (row, head), value in np.ndenumerate(values_LH):
        if np.isnan(value):
            continue
        ink = "white" if abs(value) > 0.6 * found.limit else INK
        text = f"{round(float(value), digits) + 0.0:.{digits}f}".replace("-", "−")
        axes.text(head, row, text, size=7, color=ink, ha="center", va="center")
        if (row, head) in letters:
            axes.text(head - 0.42, row - 0.42, letters[row, head], size=5.5, weight="bold", color=ink, va="top")
        if (row, head) in names:
            axes.text(head, row + 0.43, names[row, head], size=5.5, weight="bold", color=ink, ha="center", va="bottom")


def _write_marks(axes: Axes, found: _Map) -> None:
    """Letters of roles on the cells, which are too small for numbers; names of chosen heads beside theirs."""
    halo = [withStroke(linewidth=1.6, foreground="white")]
    for row, head, text in found.marks:
        axes.text(
            head + found.aside,
            row - found.aside,
            text,
            size=5.5,
            weight="bold",
            ha="center",
            va="center",
            path_effects=halo,
        )
    for (row, head, name), offset in zip(found.chosen, _offsets(found), strict=True):
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
                "shrinkB": POINTS * min(found.cell) / 2,
            },
        )


def _offsets(found: _Map) -> list[tuple[float, float]]:
    """Where each chosen head's name goes, in points right of and above its cell: inside the panel, over nothing."""
    cell, panel = np.array(found.cell) * POINTS, np.array(found.size) * POINTS
    centres = [np.array([head + 0.5, row + 0.5]) * cell for row, head, _ in found.chosen]  # y downwards
    letters = [np.array([head + 0.5 + found.aside, row + 0.5 - found.aside]) * cell for row, head, _ in found.marks]
    taken = [(centre, cell / 2 + 1) for centre in centres] + [(letter, np.full(2, 3.0)) for letter in letters]
    ring = [(0, -1), (1, -1), (-1, -1), (0, 1), (1, 1), (-1, 1), (1, 0), (-1, 0)]
    offsets = []
    for (_, _, name), centre in zip(found.chosen, centres, strict=True):
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
    """The short offsets first, and of those the ones that lead away from neighbours, so that lines do not cross."""
    near = [c for c in centres if float(np.linalg.norm(c - centre)) < POINTS]
    away = centre - np.mean(near, axis=0)
    away = away / (float(np.linalg.norm(away)) or 1.0)

    def cost(offset: Point) -> float:
        length = float(np.linalg.norm(offset))
        return length * (1.6 - float(offset @ away) / length)

    return sorted(options, key=cost)


def _outline(head: float, row: float, cell: tuple[float, float]) -> Rectangle:
    """The frame of a chosen head; around a small cell it stands off a little."""
    pad_x, pad_y = (max(0.0, 0.04 - side / 10) / side for side in cell)
    size = (1 + 2 * pad_x, 1 + 2 * pad_y)
    corner = (head - 0.5 - pad_x, row - 0.5 - pad_y)
    return Rectangle(
        corner, *size, fill=False, edgecolor=INK, linewidth=1.4 if min(cell) > 0.1 else 1.0, clip_on=False, zorder=3
    )


def _legend(figure: Figure, image: Any, head_set: HeadSet, left: float, top: float, width: float) -> None:
    """The colour bar and what the marks mean, in the place of a sixth panel; left, top and width in inches."""
    bar = figure.colorbar(image, cax=add_axes(figure, left, top, min(width, 3.6), 0.14), orientation="horizontal")
    bar.ax.tick_params(labelsize=7.5, length=2, pad=2)
    bar.outline.set(linewidth=0.6, edgecolor="#bbbbbb")
    bar.ax.set_title("one scale for all panels, logits", size=8.5, loc="left", pad=4)
    prompts = max(s.n for s in head_set.heads)
    clean = "".join(
        f", {name} {head_set.clean[name].value:.2f}" for name in ("accuracy", "margin") if name in head_set.clean
    )
    entries = (
        ("", "blue: lost by removing it (top), gained by its read (bottom)"),
        ("", "red: the opposite"),
        ("□", "chosen for splicing"),
        ("G", "Gather head: its work on the context is needed"),
        ("A", "Aggregate head: its work at the query is needed"),
        ("B", "both of these"),
        ("", f"untouched model: {prompts} prompts{clean}"),
    )
    full_width, full_height = figure.get_size_inches()
    for line, (symbol, text) in enumerate(entries):
        y = 1 - (top + 0.52 + 0.22 * line) / full_height
        figure.text(left / full_width, y, symbol, size=9, weight="bold", va="center")
        figure.text((left + 0.22 * bool(symbol)) / full_width, y, text, size=8, color=INK, va="center")


def _header() -> list[str]:
    columns = [f"{column}{end}" for column in PANELS for end in ("", "_low", "_high")]
    return ["head", "layer", "index", "role", "reads", "chosen", "n", *columns]


def _rows(head_set: HeadSet) -> Sequence[Sequence[Any]]:
    """One row a head, in the HeadSet's order; `chosen` is its place among the chosen, from 1, or empty."""
    place: dict[HeadId, int] = {s.head: i + 1 for i, s in enumerate(head_set.chosen)}
    return [
        [s.head, s.head.layer, s.head.head, s.role, s.reads or "", place.get(s.head, ""), s.n]
        + [value for column in PANELS for value in _cells(s, column)]
        for s in head_set.heads
    ]


def _cells(scored: ScoredHead, column: str) -> tuple[Any, Any, Any]:
    """Value and interval; empty where the column was not measured."""
    found = scored.scores.get(column)
    return ("", "", "") if found is None else (found.value, found.low, found.high)
