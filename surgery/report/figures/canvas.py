"""Style, colours and output files of all figures.

Figures use matplotlib's object API, without pyplot and its global state. Their bytes depend on the input only, not on
the date, random ids or the user's matplotlib settings.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from surgery.files.atomic import write_text

DPI = 150
POINTS = 72  # per inch
INK, MUTED, FAINT = "#222222", "#6b6b6b", "#d9d9d9"
# Colours of Okabe and Ito, which colour-blind readers can distinguish; grey is for the reference.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#AA5B8F", "#7a7a7a"
SKY, OCHRE = "#56B4E9", "#B8860B"
# Colour and marker of the arms of a run.
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
# Of further arms, such as the models of a comparison. Green stays that of a Transformer.
MORE_LOOKS = (
    (PURPLE, "v"),
    (OCHRE, "P"),
    (SKY, "X"),
    ("#CC6677", "<"),
    ("#332288", "h"),
    ("#117733", ">"),
)
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


def error_bars(results: Sequence[Mapping[str, float]], key: str = "accuracy") -> list[list[float]]:
    """Lengths of the bars from `key` down to `low` and up to `high`, for `Axes.errorbar`."""
    return [[max(0.0, sign * (r[key] - r[end])) for r in results] for sign, end in ((1, "low"), (-1, "high"))]


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


def add_heading(figure: Figure, title: str, note: str, left: float = 0.15) -> None:
    """Add a title, and below it a note in small type on how to read the figure; `left` in inches."""
    width, height = figure.get_size_inches()
    figure.text(left / width, 1 - 0.12 / height, title, size=12, weight="bold", va="top")
    figure.text(left / width, 1 - 0.38 / height, note, size=8.5, color=MUTED, va="top", linespacing=1.35)


def plain_log_ticks(axis: Axis) -> None:
    """Write the ticks of a logarithmic axis as plain numbers. Set the limits of the axis before."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(10, (1, 2, 5) if high / low < 100 else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def label_ends(axes: Axes, ends: Sequence[tuple[str, float, float, str]], gap: float) -> None:
    """Write each line's name to the right of its last point, shifted so that no two overlap.

    Args:
        ends: (name, x, y, colour), with x and y in data units. Set the limits of `axes` before.
        gap: smallest distance between two names, as a fraction of the axes' height.
    """
    to_axes = axes.transData + axes.transAxes.inverted()
    points = [to_axes.transform((x, y)) for _, x, y, _ in ends]
    order = sorted(range(len(ends)), key=lambda i: float(points[i][1]))
    heights: list[float] = []
    for i in order:
        wanted = float(points[i][1])
        heights.append(wanted if not heights else max(wanted, heights[-1] + gap))
    excess = max(0.0, heights[-1] - 1) if heights else 0.0
    for k in range(len(heights) - 1, -1, -1):  # shift names down that lie above the axes
        ceiling = heights[k + 1] - gap if k + 1 < len(heights) else heights[k] - excess
        heights[k] = min(heights[k], ceiling)
    for i, height in zip(order, heights, strict=True):
        name, _, _, colour = ends[i]
        axes.annotate(
            name,
            xy=(float(points[i][0]), float(points[i][1])),
            xytext=(1.03, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=colour,
            size=8.5,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.6,
                "alpha": 0.6,
                "shrinkA": 1,
                "shrinkB": 5,
                "relpos": (0, 0.5),
            },
        )


def save(figure: Figure, folder: Path, stem: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[Path]:
    """Write `STEM.png`, `STEM.svg` and the numbers as `STEM.csv`, and return the paths. Call it inside `style()`."""
    folder.mkdir(parents=True, exist_ok=True)
    png, svg, table = (folder / f"{stem}.{suffix}" for suffix in ("png", "svg", "csv"))
    figure.savefig(png, dpi=DPI, metadata={"Software": None})
    figure.savefig(svg, metadata={"Date": None, "Creator": None})
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    write_text(table, text.getvalue())
    return [png, svg, table]
