"""Attention of a spliced head for one query token.

Shape legend: T tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from numpy.typing import NDArray

from surgery.report.figures.canvas import (
    BLUE,
    GREY,
    ORANGE,
    PURPLE,
    add_axes,
    add_heading,
    new_figure,
    save,
    style,
)

_TOKENS_A_LINE = 40
_GLYPHS = str.maketrans({"\n": "⏎", "\t": "→", "\r": "␍", " ": "·"})


@style()
def attention_map(
    rows: Mapping[str, NDArray[Any]], tokens: Sequence[str], marks: Mapping[str, int], folder: Path, head: str
) -> list[Path]:
    """Draw the attention of the query token over the tokens of the prompt: `attention_HEAD.*`.

    Args:
        rows: name (`before training`) -> attention weights (T,).
        tokens: T decoded tokens. Newlines and spaces are displayed as symbols.
        marks: name (`segment end`) -> position in 0..T-1 to highlight.
        head: name of the head, such as `L1H2`.

    Returns:
        The three paths.
    """
    values = {name: np.asarray(row, dtype=np.float64) for name, row in rows.items()}
    lines = _wrap(tokens)
    span = max(stop - start for start, stop in lines)
    pitch, height = 1.7, 0.95
    figure = new_figure(max(9.2, 0.75 + 0.25 * span + 0.2), 1.2 + pitch * len(lines))
    note = "Attention weights of the query token over one prompt, which continues from line to line."
    add_heading(figure, f"{head}: attention of the query token", note)
    colours = dict(
        zip(values, [BLUE] if len(values) == 1 else [GREY, BLUE, ORANGE, PURPLE] * len(values), strict=False)
    )
    tints = dict(zip(marks, ["#F0B429", "#3DAE8B", "#C99BBD", "#8FB8DE"] * len(marks), strict=False))
    top = max(0.05, *(float(v.max()) for v in values.values())) * 1.08
    for number, (start, stop) in enumerate(lines):
        axes = add_axes(figure, 0.75, 1.15 + number * pitch, 0.25 * (stop - start), height)
        axes.set(xlim=(start - 0.5, stop - 0.5), ylim=(0, top))
        _token_line(axes, {k: v[start:stop] for k, v in values.items()}, colours, start)
        _token_ticks(axes, tokens, (start, stop), {position: tints[name] for name, position in marks.items()})
    handles: list[Any] = [Patch(color=colours[name], label=name) for name in values]
    for name, position in marks.items():
        shares = " → ".join(f"{v[position]:.2f}" for v in values.values())
        handles.append(Patch(color=tints[name], alpha=0.55, label=f"{name}: {shares}"))
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.1 / figure.get_figwidth(), 1 - 0.6 / figure.get_figheight()),
        ncols=len(handles),
        fontsize=8.5,
        borderpad=0,
    )
    table = _attention_table(values, tokens, marks)
    return save(figure, folder, f"attention_{head}", ["position", "token", "mark", *values], table)


def _wrap(tokens: Sequence[str], width: int = _TOKENS_A_LINE) -> list[tuple[int, int]]:
    """Split a prompt into lines (start, stop) of at most `width` tokens, preferably after a newline."""
    lines, start = [], 0
    while len(tokens) - start > width:
        stop = start + width
        near = (i + 1 for i in range(stop - 1, stop - 1 - width // 4, -1) if "\n" in tokens[i])
        lines.append((start, next(near, stop)))
        start = lines[-1][1]
    return [*lines, (start, len(tokens))]


def _token_line(axes: Axes, values: Mapping[str, NDArray[np.float64]], colours: Mapping[str, str], start: int) -> None:
    """Draw the bars of one line, those of the same token side by side."""
    width = 0.8 / len(values)
    for index, (name, row) in enumerate(values.items()):
        x = start + np.arange(len(row)) + (index - (len(values) - 1) / 2) * width
        axes.bar(x, row, width, color=colours[name], zorder=2)
    axes.grid(axis="y")
    axes.set_ylabel("attention", size=8.5)
    axes.tick_params(axis="y", labelsize=7.5, length=2)


def _token_ticks(axes: Axes, tokens: Sequence[str], line: tuple[int, int], tints: Mapping[int, str]) -> None:
    """Label every token of the line (start, stop). Marked positions get a band and a tinted label."""
    start, stop = line
    shown = [tokens[i].translate(_GLYPHS) for i in range(start, stop)]
    shown = [text if len(text) <= 10 else text[:9] + "…" for text in shown]
    axes.set_xticks(range(start, stop), shown, family="DejaVu Sans Mono", size=7.5)
    for label, text in zip(axes.get_xticklabels(), shown, strict=True):
        label.set_rotation(0 if len(text) <= 2 else 90)  # two characters fit the width of a token
        if text == "⏎":
            label.set_size(10)
    axes.tick_params(axis="x", length=2, pad=2)
    for position, tint in tints.items():
        if start <= position < stop:
            axes.axvspan(position - 0.5, position + 0.5, color=tint, alpha=0.4, linewidth=0, zorder=0)
            label = axes.get_xticklabels()[position - start]
            label.set(weight="bold", bbox={"facecolor": tint, "alpha": 0.55, "edgecolor": "none", "pad": 1})


def _attention_table(
    values: Mapping[str, NDArray[np.float64]], tokens: Sequence[str], marks: Mapping[str, int]
) -> list[list[Any]]:
    names = {i: " and ".join(n for n, position in marks.items() if position == i) for i in marks.values()}
    return [[i, token, names.get(i, ""), *(float(v[i]) for v in values.values())] for i, token in enumerate(tokens)]
