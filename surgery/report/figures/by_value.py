"""Accuracy, memory and new weights of the runs of a sweep, by the value of a key of the recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from surgery.recipe.grid import has_seeds
from surgery.report.figures.canvas import (
    BLUE,
    GREEN,
    GREY,
    MUTED,
    OCHRE,
    ORANGE,
    PURPLE,
    SKY,
    add_axes,
    add_heading,
    error_bars,
    new_figure,
    save,
    style,
)

Estimate = Mapping[str, float]  # value, low, high
Row = Mapping[str, Any]

_LOOKS = ((BLUE, "o"), (ORANGE, "^"), (GREEN, "s"), (PURPLE, "D"), (OCHRE, "P"), (SKY, "X"), (GREY, "v"))
_TITLES = {
    "retrieval": "retrieval tasks",
    "knowledge": "knowledge tasks",
    "held_out": "held-out rows, exact match",
}
_WIDTH, _HEIGHT = 3.3, 2.0  # of a panel, in inches
_LEFT, _GAP, _PITCH = 0.75, 1.0, 3.0


@style()
def results_by_value(rows: Sequence[Row], keys: Sequence[str], folder: Path) -> list[Path]:
    """Draw accuracy, its share of the teacher's, memory and new weights against the values of a key: `sweep.*`.

    Numbers are joined by lines. Other values are points in their order.

    Args:
        rows: for each combination of values: `values` by key, `seeds`, `accuracy` and `share_of_teacher` by group of
            tasks, `kv_bytes_per_token`, `state_bytes` and `new_parameters`. A result is a mapping of `value`, `low` and
            `high`.
        keys: the keys with several values: the first for the axis, the second for the series. The seed is ignored if
            there is another key.

    Returns:
        The three paths.
    """
    named = [key for key in keys if key in rows[0]["values"]]
    panels = _panels(rows)
    series = _series(rows, named[1] if len(named) > 1 else "")
    lines = -(-len(panels) // 2)
    top = 0.95 if len(series) == 1 else 1.2
    figure = new_figure(_LEFT + 2 * _WIDTH + _GAP + 0.25, top + (lines - 1) * _PITCH + _HEIGHT + 0.85)
    note = (
        "Points: mean over seeds. Bars: smallest to largest."
        if has_seeds(keys)
        else "Bars: 95% Wilson intervals of accuracies."
    )
    add_heading(figure, f"Results by {' and '.join(named)}", note)
    for index, (title, results) in enumerate(panels):
        left, upper = _LEFT + index % 2 * (_WIDTH + _GAP), top + index // 2 * _PITCH
        axes = add_axes(figure, left, upper, _WIDTH, _HEIGHT)
        axes.set_title(title, size=9, loc="left")
        _draw(axes, named[0], series, results)
        _limit(axes, title, [results[id(row)] for row in rows if id(row) in results])
    if len(series) > 1:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        anchor = (0.1 / figure.get_figwidth(), 1 - 0.58 / figure.get_figheight())
        figure.legend(handles, labels, loc="upper left", bbox_to_anchor=anchor, ncols=4, fontsize=8.5, borderpad=0)
    table = [
        [*(_text(row["values"][key]) for key in named), len(row["seeds"]), title, r["value"], r["low"], r["high"]]
        for title, results in panels
        for row in rows
        if (r := results.get(id(row))) is not None
    ]
    return save(figure, folder, "sweep", [*named, "seeds", "result", "value", "low", "high"], table)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _panels(rows: Sequence[Row]) -> list[tuple[str, dict[int, Estimate]]]:
    """Title of each panel, with the results by the identity of their row."""
    panels: list[tuple[str, dict[int, Estimate]]] = []
    for field, suffix in (("accuracy", ": accuracy"), ("share_of_teacher", ": share of the teacher's accuracy")):
        for group, title in _TITLES.items():
            results = {id(row): row[field][group] for row in rows if group in row[field]}
            if results:
                panels.append((title + suffix, results))
    fields = (
        ("kv_bytes_per_token", "KV bytes a token"),
        ("state_bytes", "state bytes"),
        ("new_parameters", "new weights"),
    )
    for field, title in fields:
        panels.append((title, {id(row): row[field] for row in rows}))
    return panels


def _series(rows: Sequence[Row], key: str) -> dict[str, list[Row]]:
    """Rows by the value of the second key, named as in a legend: `state_size=16`."""
    series: dict[str, list[Row]] = {}
    for row in rows:
        name = f"{key.rpartition('.')[2]}={_text(row['values'][key])}" if key else ""
        series.setdefault(name, []).append(row)
    return series


def _draw(axes: Axes, key: str, series: Mapping[str, Sequence[Row]], results: Mapping[int, Estimate]) -> None:
    """Draw one panel: a line or points for each series, with bars from low to high."""
    every = [row["values"][key] for rows in series.values() for row in rows]
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in every)
    by_text = {_text(value): value for value in every}
    places = {text: float(value) if numeric else float(i) for i, (text, value) in enumerate(by_text.items())}
    for index, (name, rows) in enumerate(series.items()):
        colour, marker = _LOOKS[index % len(_LOOKS)]
        points = [(places[_text(row["values"][key])], results[id(row)]) for row in rows if id(row) in results]
        points = sorted(points, key=lambda point: point[0])
        aside = 0.0 if numeric else 0.14 * (index - (len(series) - 1) / 2)
        x = [place + aside for place, _ in points]
        y = [r["value"] for _, r in points]
        bars = error_bars([r for _, r in points], "value")
        axes.errorbar(x, y, bars, label=name, color=colour, marker=marker, markersize=5, capsize=2.5, elinewidth=1,
                      linewidth=1.6, linestyle="-" if numeric else "")  # fmt: skip
    _value_axis(axes, key, places, numeric)


def _value_axis(axes: Axes, key: str, ticks: Mapping[str, float], numeric: bool) -> None:
    """Put a tick at every value. Numbers of very different size get a log scale, linear around 0."""
    texts, places = list(ticks), list(ticks.values())
    positive = sorted(place for place in places if place > 0)
    if numeric and min(places) >= 0 and positive and positive[-1] >= 16 * positive[0]:
        if min(places) == 0:
            axes.set_xscale("symlog", base=2, linthresh=positive[0])
            axes.set_xlim(-positive[0] / 4, positive[-1] * 2**0.25)
        else:
            axes.set_xscale("log", base=2)
            axes.set_xlim(positive[0] / 2**0.25, positive[-1] * 2**0.25)
    else:
        margin = 0.06 * (max(places) - min(places)) if numeric else 0.5
        axes.set_xlim(min(places) - (margin or 0.5), max(places) + (margin or 0.5))
    long = max(map(len, texts)) * len(texts) > 40
    axes.set_xticks(places, [text if len(text) <= 16 else f"…{text[-15:]}" for text in texts])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    if long:
        for label in axes.get_xticklabels():
            label.set(rotation=20, ha="right", size=7.5)
    else:
        axes.set_xlabel(key)


def _limit(axes: Axes, title: str, results: Sequence[Estimate]) -> None:
    """Begin the y axis at 0, and end an axis of accuracies at 1."""
    axes.grid(axis="y")
    top = max(r["high"] for r in results)
    if title.endswith("accuracy"):
        axes.set_ylim(0, 1.03 if top <= 1 else 1.05 * top)
        if "share" in title:
            axes.axhline(1, color=MUTED, linewidth=0.9, linestyle=":", zorder=0)
    else:
        axes.set_ylim(0, 1.08 * top or 1)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
