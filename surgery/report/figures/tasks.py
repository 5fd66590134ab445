"""Accuracy of retrieval and knowledge tasks for an analysis, by site and by arm.

Both figures show every task with its 95% interval. Knowledge tasks have dashed lines and hollow markers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from surgery.probes.registry import PROBES
from surgery.report.figures.canvas import (
    BLUE,
    GREEN,
    GREY,
    INK,
    MUTED,
    OCHRE,
    ORANGE,
    PURPLE,
    SKY,
    add_axes,
    add_heading,
    error_bars,
    label_ends,
    new_figure,
    save,
    style,
)

# Colour and marker of the tasks of an analysis.
_COLOURS = {
    "kv_retrieval": (BLUE, "o"),
    "letter_choice": (ORANGE, "^"),
    "option_text": (GREEN, "s"),
    "closed_book": (PURPLE, "D"),
}
_MORE_TASKS = ((OCHRE, "P"), (SKY, "X"), (GREY, "v"))
_SITES = {
    "prune": ("Retrieval and knowledge with layers pruned from the end", "layers kept, counted from the first"),
    "drop_one": ("Retrieval and knowledge with one layer dropped", "dropped layer"),
    "disable_one": ("Retrieval and knowledge with one head disabled", "disabled head"),
    "swap_one": ("Retrieval and knowledge with one layer of the teacher", "swapped layer"),
}
_TICKS = 34  # labels that fit below the axis
Tasks = Mapping[str, Any]


@style()
def tasks_by_site(
    kind: str,
    base: Tasks,
    sites: Mapping[str, Tasks],
    chance: Mapping[str, float],
    folder: Path,
    minimal: int | None = None,
) -> list[Path]:
    """Draw accuracy by task, and perplexity below it, against the changed layer or head: `KIND.*`.

    Args:
        kind: `prune`, `drop_one`, `disable_one` or `swap_one`.
        base: results of the complete model: task -> `accuracy`, `low`, `high` (0 to 1) and `n`; and `perplexity`.
        sites: the same for each layer or head, in the order of the axis; for `prune` by the number of layers kept.
        chance: chance accuracy by task.
        minimal: for `prune`, the number of layers of the minimal model.

    Returns:
        The three paths.
    """
    title, x_label = _SITES[kind]
    shown = dict(sites)
    if kind == "prune":  # the complete model is the last column
        shown[str(len(shown) + 1)] = base
    width = max(4.6, min(9.0, 0.3 * len(shown)))
    figure = new_figure(width + 2.25, 5.8)
    whole = "The complete model is at the right." if kind == "prune" else "Thin lines: the complete model."
    guess = ", ".join(f"{look[0]} {chance[task]:.2f}" for task, look in _looks(base).items() if task in chance)
    add_heading(figure, title, f"Bars: 95% intervals. Hollow: knowledge. {whole}\nChance: {guess}.")
    upper = add_axes(figure, 0.75, 0.95, width, 2.75)
    lower = add_axes(figure, 0.75, 3.95, width, 1.0)
    level, joined = None if kind == "prune" else base, kind != "disable_one"
    ends = _accuracies(upper, list(shown.values()), level, joined, aside=0.07 * len(shown) / width)
    _perplexities(lower, list(shown.values()), level, joined)
    for axes in (upper, lower):
        _site_axis(axes, list(shown))
        if minimal is not None:
            place = list(shown).index(str(minimal))
            axes.axvline(place, color=MUTED, linewidth=0.9, linestyle=(0, (1, 2)), zorder=0)
            if axes is upper:
                axes.text(place, 1.035, f"minimal: {minimal}", size=8, color=MUTED, ha="center", va="bottom")
    upper.tick_params(labelbottom=False)
    lower.set_xlabel(x_label)
    label_ends(upper, ends, gap=0.075)
    rows = [row for site, tasks in {"base": base, **sites}.items() for row in _rows(site, tasks)]
    return save(figure, folder, kind, _HEADER, rows)


def _look(task: str, index: int) -> tuple[str, str, str, bool]:
    """Name, colour, marker, and whether the task measures knowledge. Other tasks take the next free colour."""
    name, knowledge = task.replace("_", " "), False
    if task in PROBES:
        name, knowledge = PROBES[task].short_label, PROBES[task].knowledge
    return (name, *(_COLOURS.get(task) or _MORE_TASKS[index % len(_MORE_TASKS)]), knowledge)


def _names(tasks: Tasks) -> list[str]:
    return [task for task, value in tasks.items() if isinstance(value, Mapping)]


def _looks(tasks: Tasks) -> dict[str, tuple[str, str, str, bool]]:
    unknown = [task for task in _names(tasks) if task not in _COLOURS]
    return {task: _look(task, unknown.index(task) if task in unknown else 0) for task in _names(tasks)}


def _accuracies(
    axes: Axes, columns: Sequence[Tasks], base: Tasks | None, joined: bool, aside: float
) -> list[tuple[str, float, float, str]]:
    """Draw every task with its intervals, and the base as thin lines. Return the arguments of `label_ends`."""
    axes.set_xlim(-0.6, len(columns) - 0.4)
    axes.set_ylim(0, 1.03)
    axes.set_ylabel("accuracy")
    axes.grid(axis="y")
    ends, looks = [], _looks(columns[0])
    for shift, (task, (name, colour, marker, knowledge)) in enumerate(looks.items()):
        # A small shift keeps the bars of tasks apart where they agree.
        x = [i + aside * (shift - (len(looks) - 1) / 2) for i in range(len(columns))]
        values = [column[task] for column in columns]
        y = [v["accuracy"] for v in values]
        line = ("--" if knowledge else "-") if joined else ""
        face = "white" if knowledge else colour
        axes.errorbar(x, y, error_bars(values), color=colour, linestyle=line, marker=marker, markersize=5,
                      markerfacecolor=face, linewidth=1.5, elinewidth=0.9)  # fmt: skip
        if base is not None:
            axes.axhline(base[task]["accuracy"], color=colour, linewidth=0.7, alpha=0.7, zorder=0)
        ends.append((name, x[-1], y[-1], colour))
    return ends


def _perplexities(axes: Axes, columns: Sequence[Tasks], base: Tasks | None, joined: bool) -> None:
    axes.set_xlim(-0.6, len(columns) - 0.4)
    values = [column["perplexity"] for column in columns]
    axes.plot(range(len(values)), values, color=INK, linestyle="-" if joined else "", marker=".", linewidth=1.2)
    if base is not None:
        axes.axhline(base["perplexity"], color=INK, linewidth=0.7, alpha=0.7, zorder=0)
    axes.set_ylabel("perplexity")
    every = [*values, base["perplexity"]] if base is not None else values
    if max(every) > 3 * min(every):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y")


def _site_axis(axes: Axes, names: Sequence[str]) -> None:
    """Put a tick at every site and a label at as many as fit; names of heads are vertical."""
    step = -(-len(names) // _TICKS)
    heads = any(not name.isdigit() for name in names)
    places = range(0, len(names), step)
    axes.set_xticks(places, [names[i] for i in places], rotation=90 if heads else 0)


_HEADER = ["arm", "task", "accuracy", "low", "high", "n"]


def _rows(arm: str, tasks: Tasks) -> list[list[Any]]:
    rows = [[arm, task, *(tasks[task][key] for key in _HEADER[2:])] for task in _names(tasks)]
    return [*rows, [arm, "perplexity", tasks["perplexity"], "", "", ""]]


@style()
def tasks_by_arm(arms: Mapping[str, Tasks], chance: Mapping[str, float], folder: Path) -> list[Path]:
    """Draw one panel per task and one row per arm, with a line at the base's accuracy: `tasks_by_arm.*`.

    Args:
        arms: arm -> results as in `tasks_by_site`, `base` first.
        chance: chance accuracy by task.

    Returns:
        The three paths.
    """
    looks, names = _looks(arms["base"]), list(arms)
    left, panel, gap = 0.35 + 0.078 * max(map(len, names)), 1.5, 0.22
    height = 0.3 + 0.25 * len(names)
    figure = new_figure(left + (len(looks) + 1) * (panel + gap) + 0.1, height + 1.55)
    note = "Accuracy with 95% intervals. Hollow: knowledge. Line: the complete model. Dotted: chance."
    add_heading(figure, "Retrieval and knowledge with parts of the model removed", note)
    panels = [*looks, "perplexity"]
    for index, task in enumerate(panels):
        axes = add_axes(figure, left + index * (panel + gap), 1.0, panel, height)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_yticks(range(len(names)), [n.replace("_", " ") for n in names] if index == 0 else [""] * len(names))
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y")
        if task == "perplexity":
            _perplexity_panel(axes, [tasks["perplexity"] for tasks in arms.values()])
        else:
            _panel(axes, [tasks[task] for tasks in arms.values()], looks[task], chance.get(task))
    return save(figure, folder, "tasks_by_arm", _HEADER, [row for arm in names for row in _rows(arm, arms[arm])])


def _panel(
    axes: Axes, values: Sequence[Mapping[str, float]], look: tuple[str, str, str, bool], chance: float | None
) -> None:
    name, colour, marker, knowledge = look
    axes.set_title(name, size=9, color=colour)
    axes.set_xlim(-0.03, 1.03)
    axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    axes.set_xlabel("accuracy")
    x = [v["accuracy"] for v in values]
    axes.errorbar(x, range(len(x)), xerr=error_bars(values), color=colour, linestyle="", marker=marker, markersize=5,
                  markerfacecolor="white" if knowledge else colour, elinewidth=1)  # fmt: skip
    axes.axvline(x[0], color=colour, linewidth=0.7, alpha=0.7, zorder=0)
    if chance is not None:
        axes.axvline(chance, color=MUTED, linewidth=1, linestyle=":", zorder=0)


def _perplexity_panel(axes: Axes, values: Sequence[float]) -> None:
    axes.set_title("perplexity", size=9)
    axes.plot(values, range(len(values)), color=INK, linestyle="", marker=".")
    axes.axvline(values[0], color=INK, linewidth=0.7, alpha=0.7, zorder=0)
    if max(values) > 3 * min(values):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
