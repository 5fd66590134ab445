"""Accuracy of retrieval and knowledge tasks for an analysis, by site and by arm.

Both figures show every task with its 95% interval. Knowledge tasks have hollow markers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surgery.probes.registry import PROBES
from surgery.report.figures.canvas import (
    INK,
    MUTED,
    add_axes,
    add_heading,
    draw_intervals,
    label_ends,
    looks_of,
    new_figure,
    plain_log_ticks,
    save,
    style,
)

Tasks = Mapping[str, Any]  # task -> accuracy, low, high (0 to 1) and n; and `perplexity`

_SITES = {
    "prune": ("Retrieval and knowledge with layers pruned from the end", "layers kept, counted from the first"),
    "drop_one": ("Retrieval and knowledge with one layer dropped", "dropped layer"),
    "disable_one": ("Retrieval and knowledge with one head disabled", "disabled head"),
    "swap_one": ("Retrieval and knowledge with one layer of the teacher", "swapped layer"),
}
_TICKS = 34  # labels that fit below the axis
_HEADER = ["arm", "task", "accuracy", "low", "high", "n"]


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
        base: results of the complete model.
        sites: results for each layer or head, in the order of the axis; for `prune` by the number of layers kept.
        chance: chance accuracy by task.
        minimal: for `prune`, the number of layers of the minimal model.

    Returns:
        The three paths.
    """
    title, x_label = _SITES[kind]
    is_prune, is_line = kind == "prune", kind != "disable_one"
    shown = {**sites, str(len(sites) + 1): base} if is_prune else dict(sites)  # the complete model is the last column
    names, columns = list(shown), list(shown.values())
    width = max(4.6, min(9.0, 0.3 * len(names)))
    figure = new_figure(width + 2.25, 5.8)
    whole = "The complete model is at the right." if is_prune else "Thin lines: the complete model."
    guess = ", ".join(f"{_label(task)} {chance[task]:.2f}" for task in _names(base) if task in chance)
    add_heading(figure, title, f"Bars: 95% intervals. Hollow: knowledge. {whole}\nChance: {guess}.")
    upper = add_axes(figure, 0.75, 0.95, width, 2.75)
    lower = add_axes(figure, 0.75, 3.95, width, 1.0)
    step = -(-len(names) // _TICKS)
    for axes in (upper, lower):
        axes.set_xlim(-0.6, len(names) - 0.4)
        axes.set_xticks(range(0, len(names), step), names[::step], rotation=0 if is_line else 90)
        axes.grid(axis="y")
        if minimal is not None:
            axes.axvline(names.index(str(minimal)), color=MUTED, linewidth=0.9, linestyle=(0, (1, 2)), zorder=0)
    if minimal is not None:
        upper.text(names.index(str(minimal)), 1.035, f"minimal: {minimal}", size=8, color=MUTED, ha="center")
    upper.set(ylim=(0, 1.03), ylabel="accuracy")
    upper.tick_params(labelbottom=False)
    lower.set(xlabel=x_label, ylabel="perplexity")
    ends = []
    for shift, (task, look) in enumerate(looks_of(_names(base)).items()):
        # A small shift keeps the bars of tasks apart where they agree.
        aside = 0.07 * len(names) / width * (shift - (len(base) - 2) / 2)
        results = [column[task] for column in columns]
        places = [i + aside for i in range(len(names))]
        draw_intervals(upper, places, results, look, joined=is_line, hollow=_is_knowledge(task))
        if not is_prune:
            upper.axhline(base[task]["accuracy"], color=look[0], linewidth=0.7, alpha=0.7, zorder=0)
        ends.append((_label(task), places[-1], results[-1]["accuracy"], look[0]))
    label_ends(upper, ends, gap=0.075)
    values = [column["perplexity"] for column in columns]
    lower.plot(range(len(values)), values, color=INK, linestyle="-" if is_line else "", marker=".", linewidth=1.2)
    if not is_prune:
        lower.axhline(base["perplexity"], color=INK, linewidth=0.7, alpha=0.7, zorder=0)
    if max(values) > 3 * min(values):
        lower.set_yscale("log")
        plain_log_ticks(lower.yaxis)
    return save(figure, folder, kind, _HEADER, _rows({"base": base, **sites}))


@style()
def tasks_by_arm(arms: Mapping[str, Tasks], chance: Mapping[str, float], folder: Path) -> list[Path]:
    """Draw one panel per task and one row per arm, with a line at the base's accuracy: `tasks_by_arm.*`.

    Args:
        arms: arm -> results, `base` first.
        chance: chance accuracy by task.

    Returns:
        The three paths.
    """
    names, looks = list(arms), looks_of(_names(arms["base"]))
    left, panel, gap = 0.35 + 0.078 * max(map(len, names)), 1.5, 0.22
    height = 0.3 + 0.25 * len(names)
    figure = new_figure(left + (len(looks) + 1) * (panel + gap) + 0.1, height + 1.55)
    note = "Accuracy with 95% intervals. Hollow: knowledge. Line: the complete model. Dotted: chance."
    add_heading(figure, "Retrieval and knowledge with parts of the model removed", note)
    for index, task in enumerate([*looks, "perplexity"]):
        axes = add_axes(figure, left + index * (panel + gap), 1.0, panel, height)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_yticks(range(len(names)), [n.replace("_", " ") for n in names] if index == 0 else [""] * len(names))
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y")
        results = [tasks[task] for tasks in arms.values()]
        if task == "perplexity":
            axes.set_title("perplexity", size=9)
            axes.plot(results, range(len(names)), color=INK, linestyle="", marker=".")
            axes.axvline(results[0], color=INK, linewidth=0.7, alpha=0.7, zorder=0)
            if max(results) > 3 * min(results):
                axes.set_xscale("log")
                plain_log_ticks(axes.xaxis)
            continue
        axes.set_title(_label(task), size=9, color=looks[task][0])
        axes.set(xlim=(-0.03, 1.03), xlabel="accuracy")
        axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        draw_intervals(axes, range(len(names)), results, looks[task], hollow=_is_knowledge(task), sideways=True)
        axes.axvline(results[0]["accuracy"], color=looks[task][0], linewidth=0.7, alpha=0.7, zorder=0)
        if task in chance:
            axes.axvline(chance[task], color=MUTED, linewidth=1, linestyle=":", zorder=0)
    return save(figure, folder, "tasks_by_arm", _HEADER, _rows(arms))


def _names(tasks: Tasks) -> list[str]:
    return [task for task in tasks if task != "perplexity"]


def _label(task: str) -> str:
    return PROBES[task].short_label if task in PROBES else task.replace("_", " ")


def _is_knowledge(task: str) -> bool:
    return task in PROBES and PROBES[task].knowledge


def _rows(arms: Mapping[str, Tasks]) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for arm, tasks in arms.items():
        rows += [[arm, task, *(tasks[task][key] for key in _HEADER[2:])] for task in _names(tasks)]
        rows.append([arm, "perplexity", tasks["perplexity"], "", "", ""])
    return rows
