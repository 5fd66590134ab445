"""Style, colours and output files of all figures.

Figures use matplotlib's object API, without pyplot and its global state. Their bytes depend on the input only, not on
the date, random ids or the user's matplotlib settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from surgery.report.text import write_rows

DPI = 150
POINTS = 72  # per inch
INK, MUTED, FAINT = "#222222", "#6b6b6b", "#d9d9d9"
# Colours of Okabe and Ito, which colour-blind readers can distinguish; grey is for the reference.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#AA5B8F", "#7a7a7a"
SKY, OCHRE = "#56B4E9", "#B8860B"
# Colour and marker of what has no look of its own, in order.
LOOKS = ((BLUE, "o"), (ORANGE, "^"), (GREEN, "s"), (PURPLE, "D"), (OCHRE, "P"), (SKY, "X"), (GREY, "v"))
# Those of the arms of a run.
ARM_LOOKS = {
    "base": (GREY, "s"),
    "hybrid": (BLUE, "o"),
    "no_splice": (ORANGE, "^"),
    "hybrid_heads_off": (SKY, "X"),
    "teacher": (GREEN, "D"),
    "transformer": (GREEN, "D"),
    "base_read_twice": (MUTED, "v"),
    "no_splice_read_twice": (OCHRE, "v"),
}
_STYLE = {
    "svg.hashsalt": "surgery",
    "font.family": "DejaVu Sans",  # ships with matplotlib
    "font.size": 9,
    "text.parse_math": False,  # a token may be a dollar sign
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
}


def looks_of(names: Sequence[str], known: Mapping[str, tuple[str, str]] = ARM_LOOKS) -> dict[str, tuple[str, str]]:
    """Colour and marker by name: those of `known`, otherwise the next ones of `LOOKS` in another colour."""
    taken = {known[name][0] for name in names if name in known}
    free = cycle([look for look in LOOKS if look[0] not in taken])
    return {name: known.get(name) or next(free) for name in names}


@contextmanager
def style() -> Iterator[None]:
    """Set the style of figures, and restore the user's settings afterwards. Also a decorator."""
    with matplotlib.rc_context():
        # `rc_context` does not restore the backend, so it is left unchanged: a notebook keeps its own.
        defaults = {k: v for k, v in matplotlib.rcParamsDefault.items() if not k.startswith("backend")}
        matplotlib.rcParams.update(defaults)
        matplotlib.rcParams.update(_STYLE)
        yield


def new_figure(width: float, height: float) -> Figure:
    """Create an empty figure; width and height in inches."""
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def add_axes(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Add axes at a position in inches, from the figure's upper left corner."""
    full_width, full_height = figure.get_size_inches()
    bottom = full_height - top - height
    return figure.add_axes((left / full_width, bottom / full_height, width / full_width, height / full_height))


def add_heading(figure: Figure, title: str, note: str) -> None:
    """Add a title, and below it a note in small type on how to read the figure."""
    width, height = figure.get_size_inches()
    figure.text(0.15 / width, 1 - 0.12 / height, title, size=12, weight="bold", va="top")
    figure.text(0.15 / width, 1 - 0.38 / height, note, size=8.5, color=MUTED, va="top", linespacing=1.35)


def plain_log_ticks(axis: Axis) -> None:
    """Write the ticks of a logarithmic axis as plain numbers. Set the limits of the axis before."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(10, (1, 2, 5) if high / low < 100 else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def log2_ticks(axes: Axes, numbers: Sequence[int]) -> None:
    """Make the x axis logarithmic, with a tick at each of the numbers."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="minor", length=0)


def draw_intervals(
    axes: Axes,
    places: Sequence[float],
    results: Sequence[Mapping[str, float]],
    look: tuple[str, str],
    key: str = "accuracy",
    joined: bool = False,
    sideways: bool = False,
) -> None:
    """Draw results as points with bars from `low` to `high`.

    `places` are on the x axis, or on the y axis if `sideways`. `look` is colour and marker. `joined` connects the
    points.
    """
    colour, marker = look
    values = [result[key] for result in results]
    bars = [[max(0.0, sign * (r[key] - r[end])) for r in results] for sign, end in ((1, "low"), (-1, "high"))]
    x, y = (values, places) if sideways else (places, values)
    axes.errorbar(
        x,
        y,
        xerr=bars if sideways else None,
        yerr=None if sideways else bars,
        color=colour,
        linestyle="-" if joined else "",
        linewidth=1.8,
        marker=marker,
        markersize=5,
        capsize=2.5,
        elinewidth=1,
        clip_on=not sideways,  # a marker at 0 or 1 is drawn whole
    )


def label_ends(axes: Axes, ends: Sequence[tuple[str, float, float, str]], gap: float = 0.065) -> None:
    """Write each line's name to the right of its last point, shifted so that no two overlap.

    Args:
        ends: (name, x, y, colour), with x and y in data units. Set the limits of `axes` before.
        gap: smallest distance between two names, as a fraction of the axes' height.
    """
    to_axes = axes.transData + axes.transAxes.inverted()
    points = [to_axes.transform((x, y)) for _, x, y, _ in ends]
    order = sorted(range(len(ends)), key=lambda i: float(points[i][1]))
    heights = np.array([float(points[i][1]) for i in order])
    steps = gap * np.arange(len(order))
    heights = np.maximum.accumulate(heights - steps) + steps  # up, so that each is above the one before
    heights = np.minimum(heights, 1 - steps[::-1])  # and down, so that the last is not above the axes
    line = {"arrowstyle": "-", "linewidth": 0.6, "alpha": 0.6, "shrinkA": 1, "shrinkB": 5, "relpos": (0, 0.5)}
    for i, height in zip(order, heights, strict=True):
        name, x, y, colour = ends[i]
        axes.annotate(
            name,
            xy=(x, y),
            xytext=(1.03, float(height)),
            textcoords="axes fraction",
            color=colour,
            size=8.5,
            va="center",
            annotation_clip=False,
            arrowprops={**line, "color": colour},
        )


def save(figure: Figure, folder: Path, stem: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[Path]:
    """Write `STEM.png`, `STEM.svg` and the numbers as `STEM.csv`, and return the paths. Call it inside `style()`."""
    folder.mkdir(parents=True, exist_ok=True)
    png, svg, table = (folder / f"{stem}.{suffix}" for suffix in ("png", "svg", "csv"))
    figure.savefig(png, dpi=DPI, metadata={"Software": None})
    figure.savefig(svg, metadata={"Date": None, "Creator": None})
    return [png, svg, write_rows(table, header, rows)]
