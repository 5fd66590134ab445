"""Accuracy, memory and new weights of the runs of a sweep, by the value of a key of the recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from surgery.recipe.grid import has_seeds, text_of
from surgery.report.figures.canvas import (
    MUTED,
    add_axes,
    add_heading,
    draw_intervals,
    looks_of,
    new_figure,
    save,
    style,
)

Row = Mapping[str, Any]
Estimate = Mapping[str, float]  # value, low, high

_GROUPS = {"retrieval": "retrieval tasks", "knowledge": "knowledge tasks", "held_out": "held-out rows, exact match"}
_SHARES = {"accuracy": "accuracy", "share_of_teacher": "share of the teacher's accuracy"}
_COUNTS = {"kv_bytes_per_token": "KV bytes a token", "state_bytes": "state bytes", "new_parameters": "new weights"}
_WIDTH, _HEIGHT = 3.3, 2.0  # of a panel, in inches
_LEFT, _GAP, _PITCH = 0.75, 1.0, 3.0


@style()
def results_by_value(rows: Sequence[Row], keys: Sequence[str], folder: Path) -> list[Path]:
    """Draw accuracy, its share of the teacher's, memory and new weights against the values of a key: `sweep.*`.

    Numbers are joined by lines.

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
    values = {text_of(row["values"][named[0]]): row["values"][named[0]] for row in rows}
    is_numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values.values())
    texts = sorted(values, key=values.__getitem__) if is_numeric else list(values)
    places = [texts.index(text_of(row["values"][named[0]])) for row in rows]
    ticks = [text if len(text) <= 16 else f"…{text[-15:]}" for text in texts]
    short = named[1].rpartition(".")[2] if len(named) > 1 else ""
    series = [f"{short}={text_of(row['values'][named[1]])}" if short else "" for row in rows]
    looks = looks_of(list(dict.fromkeys(series)))
    top = 1.2 if short else 0.95
    figure = new_figure(_LEFT + 2 * _WIDTH + _GAP + 0.25, top + (len(panels) - 1) // 2 * _PITCH + _HEIGHT + 0.85)
    seeds = "Points: mean over seeds. Bars: smallest to largest."
    note = seeds if has_seeds(keys) else "Bars: 95% Wilson intervals of accuracies."
    add_heading(figure, f"Results by {' and '.join(named)}", note)
    for index, (title, results) in enumerate(panels.items()):
        left, upper = _LEFT + index % 2 * (_WIDTH + _GAP), top + index // 2 * _PITCH
        axes = add_axes(figure, left, upper, _WIDTH, _HEIGHT)
        axes.set_title(title, size=9, loc="left")
        axes.grid(axis="y")
        axes.set_xlim(-0.5, len(texts) - 0.5)
        if max(map(len, ticks)) * len(ticks) <= 40:
            axes.set_xticks(range(len(texts)), ticks)
            axes.set_xlabel(named[0])
        else:
            axes.set_xticks(range(len(texts)), ticks, rotation=20, ha="right", size=7.5)
        for number, (name, look) in enumerate(looks.items()):
            aside = 0 if is_numeric else 0.14 * (number - (len(looks) - 1) / 2)
            points = [(x, r) for x, of, r in zip(places, series, results, strict=True) if of == name and r is not None]
            points = sorted(points, key=lambda point: point[0])
            draw_intervals(
                axes, [x + aside for x, _ in points], [r for _, r in points], look, key="value", joined=is_numeric
            )
        _limit(axes, title, [result for result in results if result is not None])
    if short:
        anchor = (0.1 / figure.get_figwidth(), 1 - 0.58 / figure.get_figheight())
        figure.legend(figure.axes[0].containers, looks, loc="upper left", bbox_to_anchor=anchor, ncols=4, fontsize=8.5,
                      borderpad=0)  # fmt: skip
    table = [
        [*(text_of(row["values"][key]) for key in named), len(row["seeds"]), title, r["value"], r["low"], r["high"]]
        for title, results in panels.items()
        for row, r in zip(rows, results, strict=True)
        if r is not None
    ]
    return save(figure, folder, "sweep", [*named, "seeds", "result", "value", "low", "high"], table)


def _panels(rows: Sequence[Row]) -> dict[str, list[Estimate | None]]:
    """Title of each panel -> one result for each row."""
    shares = {f"{group}: {share}": [row[field].get(name) for row in rows]
              for field, share in _SHARES.items() for name, group in _GROUPS.items()}  # fmt: skip
    counts = {title: [row[field] for row in rows] for field, title in _COUNTS.items()}
    return {title: results for title, results in shares.items() if any(results)} | counts


def _limit(axes: Axes, title: str, results: Sequence[Estimate]) -> None:
    """Begin the y axis at 0, and end an axis of accuracies at 1."""
    highest = max(result["high"] for result in results)
    if title in _COUNTS.values():
        axes.set_ylim(0, 1.08 * highest or 1)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    else:
        axes.set_ylim(0, 1.03 if highest <= 1 else 1.05 * highest)
        if _SHARES["share_of_teacher"] in title:
            axes.axhline(1, color=MUTED, linewidth=0.9, linestyle=":", zorder=0)
