"""Panels of results: of a sweep by value, of an analysis by changed part of the model, of the user's rows by arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from surgery.probes.registry import PROBES
from surgery.recipe.grid import has_seeds, text_of
from surgery.report.figures.canvas import (
    MUTED,
    add_axes,
    add_heading,
    draw_intervals,
    looks_of,
    new_figure,
    plain_log_ticks,
    save,
    style,
)
from surgery.report.text import cut_middle

Estimate = Mapping[str, float]  # value, low, high
Panels = dict[str, Sequence[Estimate | None]]  # title -> result by value
Row = Mapping[str, Any]
Tasks = Mapping[str, Any]  # task -> accuracy, low, high (0 to 1) and n; and `perplexity`

_GROUPS = {"retrieval": "retrieval tasks", "knowledge": "knowledge tasks", "held_out": "held-out rows, exact match"}
_SHARES = {"accuracy": "accuracy", "share_of_teacher": "share of the teacher's accuracy"}
_COUNTS = {"kv_bytes_per_token": "KV bytes a token", "state_bytes": "state bytes", "new_parameters": "new weights"}
_ROW_HEIGHT = 0.27  # inches
_OWN_HEADER = ["data", "arm", "accuracy", "low", "high", "n"]
_HEADER = ["arm", "task", "accuracy", "low", "high", "n"]
_PARTS = {  # title and x axis
    "tasks_by_arm": ("Retrieval and knowledge with parts of the model removed", ""),
    "prune": ("Retrieval and knowledge with layers pruned from the end", "layers kept, counted from the first"),
    "drop_one": ("Retrieval and knowledge with one layer dropped", "dropped layer"),
    "disable_one": ("Retrieval and knowledge with one head disabled", "disabled head"),
    "swap_one": ("Retrieval and knowledge with one layer of the teacher", "swapped layer"),
}
_WIDTH, _HEIGHT = 3.3, 2.0  # of a panel, in inches
_LEFT, _GAP, _PITCH = 0.75, 1.0, 3.0
_TICKS = 16  # labels that fit below a panel


@style()
def results_by_value(rows: Sequence[Row], keys: Sequence[str], folder: Path) -> list[Path]:
    """Draw accuracy, its share of the teacher's, memory and new weights against the values of a key: `sweep.*`.

    Args:
        rows: of sweep.json, one for each combination of values.
        keys: the keys with several values: the first for the axis, the second for the series. The seed is ignored if
            there is another key.
    """
    first, *more = named = [key for key in keys if key in rows[0]["values"]]
    panels: Panels = {
        f"{group}: {share}": [row[field].get(name) for row in rows]
        for field, share in _SHARES.items()
        for name, group in _GROUPS.items()
    }
    panels = {title: results for title, results in panels.items() if any(results)}
    panels |= {title: [row[field] for row in rows] for field, title in _COUNTS.items()}
    series = [f"{more[0].rpartition('.')[2]}={text_of(row['values'][more[0]])}" if more else "" for row in rows]
    seeds = "Points: mean over seeds. Bars: smallest to largest."
    note = seeds if has_seeds(keys) else "Bars: 95% Wilson intervals of accuracies."
    values = [row["values"][first] for row in rows]
    full = {title: 1.0 for title in panels if title.endswith(_SHARES["share_of_teacher"])}
    figure = _draw(f"Results by {' and '.join(named)}", note, first, values, panels, full, series if more else None)
    table = [
        [*(text_of(row["values"][key]) for key in named), len(row["seeds"]), title, r["value"], r["low"], r["high"]]
        for title, results in panels.items()
        for row, r in zip(rows, results, strict=True)
        if r is not None
    ]
    return save(figure, folder, "sweep", [*named, "seeds", "result", "value", "low", "high"], table)


@style()
def tasks_by_part(
    kind: str,
    base: Tasks,
    parts: Mapping[str, Tasks],
    chance: Mapping[str, float],
    folder: Path,
    minimal: int | None = None,
) -> list[Path]:
    """Draw accuracy by task, and perplexity, of models in which a part was changed: `KIND.*`.

    Args:
        kind: a sweep of an analysis, `prune`, `drop_one`, `disable_one` or `swap_one`; or `tasks_by_arm`.
        base: results of the complete model, a dotted line.
        parts: results by the changed layer, head or arm; for `prune` by the number of layers that are kept.
        chance: chance accuracy by task.
        minimal: for `prune`, the number of layers of the minimal model.
    """
    title, axis = _PARTS[kind]
    models = {"base": base, **parts}
    tasks = [task for task in base if task != "perplexity"]
    panels: Panels = {
        _label(task, chance): [{**part[task], "value": part[task]["accuracy"]} for part in parts.values()]
        for task in tasks
    }
    perplexities = [float(part["perplexity"]) for part in parts.values()]
    panels["perplexity"] = [{"value": value, "low": value, "high": value} for value in perplexities]
    levels = {_label(task, chance): base[task]["accuracy"] for task in tasks} | {"perplexity": base["perplexity"]}
    note = "Bars: 95% intervals. Dotted: the complete model."
    note += f" Minimal model: {minimal} layers." if minimal is not None else ""
    figure = _draw(title, note, axis, [int(part) if part.isdigit() else part for part in parts], panels, levels)
    rows = [
        [name, task, *(model[task][key] for key in _HEADER[2:])]
        if task in tasks
        else [name, task, model[task], "", "", ""]
        for name, model in models.items()
        for task in [*tasks, "perplexity"]
    ]
    return save(figure, folder, kind, _HEADER, rows)


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
    heights = [_ROW_HEIGHT * len(arms) + 0.75 for arms in data.values()]
    figure = new_figure(left + 5.3, 0.85 + sum(heights))
    add_heading(figure, "Held-out rows of your data", "Generated answers that match exactly. Bars: 95% intervals.")
    for (name, arms), height in zip(data.items(), heights, strict=True):
        axes = add_axes(figure, left, top, 4.4, _ROW_HEIGHT * len(arms))
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
        [name, arm, *(entry[key] for key in _OWN_HEADER[2:])]
        for name, arms in data.items()
        for arm, entry in arms.items()
    ]
    return save(figure, folder, "held_out_accuracy", _OWN_HEADER, cells)


def _label(task: str, chance: Mapping[str, float]) -> str:
    """Title of a task's panel."""
    name = PROBES[task].short_label if task in PROBES else task.replace("_", " ")
    kind = "knowledge" if task in PROBES and PROBES[task].knowledge else "retrieval"
    return f"{name} ({kind}" + (f"; chance {chance[task]:.2f})" if task in chance else ")")


def _draw(
    title: str,
    note: str,
    axis: str,
    values: Sequence[Any],
    panels: Panels,
    levels: Mapping[str, float],
    series: Sequence[str] | None = None,
) -> Figure:
    """Draw one panel for each title. Numbers are joined by lines in order, evenly spaced; other values are points.

    `values` and `series` have one entry for each result of a panel; `levels` is a dotted line, by title.
    """
    by_text = {text_of(value): value for value in values}
    is_numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    texts = sorted(by_text, key=by_text.__getitem__) if is_numeric else list(by_text)
    names = list(series or [""] * len(values))
    looks = looks_of(list(dict.fromkeys(names)))
    top = 0.95 if series is None else 1.2
    figure = new_figure(_LEFT + 2 * _WIDTH + _GAP + 0.25, top + (len(panels) - 1) // 2 * _PITCH + _HEIGHT + 0.85)
    add_heading(figure, title, note)
    for index, (panel, results) in enumerate(panels.items()):
        left, upper = _LEFT + index % 2 * (_WIDTH + _GAP), top + index // 2 * _PITCH
        axes = add_axes(figure, left, upper, _WIDTH, _HEIGHT)
        axes.set_title(panel, size=9, loc="left")
        for number, (name, look) in enumerate(looks.items()):
            aside = 0 if is_numeric else 0.14 * (number - (len(looks) - 1) / 2)
            points = [
                (texts.index(text_of(value)), result)
                for value, of, result in zip(values, names, results, strict=True)
                if of == name and result is not None
            ]
            points = sorted(points, key=lambda point: point[0])
            places, shown = [place + aside for place, _ in points], [result for _, result in points]
            draw_intervals(axes, places, shown, look, key="value", joined=is_numeric)
        if panel in levels:
            axes.axhline(levels[panel], color=MUTED, linewidth=0.9, linestyle=":", zorder=0)
        _scale(axes, panel, [r for r in results if r is not None])
        _write_values(axes, texts, axis)
    if series is not None:
        anchor = (0.1 / figure.get_figwidth(), 1 - 0.58 / figure.get_figheight())
        handles = figure.axes[0].containers
        figure.legend(handles, looks, loc="upper left", bbox_to_anchor=anchor, ncols=4, fontsize=8.5, borderpad=0)
    return figure


def _scale(axes: Axes, panel: str, results: Sequence[Estimate]) -> None:
    """Begin the y axis at 0, and end an axis of accuracies at 1. Perplexities may get a log scale."""
    axes.grid(axis="y")
    highest = max(result["high"] for result in results)
    if panel == "perplexity":
        if highest > 3 * min(result["low"] for result in results):
            axes.set_yscale("log")
            plain_log_ticks(axes.yaxis)
    elif panel in _COUNTS.values():
        axes.set_ylim(0, 1.08 * highest or 1)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    else:
        axes.set_ylim(0, 1.03 if highest <= 1 else 1.05 * highest)


def _write_values(axes: Axes, texts: Sequence[str], axis: str) -> None:
    """Label the x axis; long labels are cut and slanted, and of many every n-th is written."""
    axes.set_xlim(-0.5, len(texts) - 0.5)
    every = -(-len(texts) // _TICKS)
    labels = [text if len(text) <= 16 else f"…{text[-15:]}" for text in texts[::every]]
    if max(map(len, labels)) * len(labels) <= 40:
        axes.set_xticks(range(0, len(texts), every), labels)
        axes.set_xlabel(axis)
    else:
        axes.set_xticks(range(0, len(texts), every), labels, rotation=20, ha="right", size=7.5)
