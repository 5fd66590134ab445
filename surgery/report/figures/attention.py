"""Attention of a spliced head for one query token.

Shape legend: T tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.patches import Patch
from numpy.typing import NDArray

from surgery.report.figures.canvas import BLUE, GREY, add_axes, add_heading, new_figure, save, style

_TOKENS_A_LINE = 40
_GLYPHS = str.maketrans({"\n": "⏎", "\t": "→", "\r": "␍", " ": "·"})
_TINTS = ("#F0B429", "#3DAE8B", "#C99BBD", "#8FB8DE")  # of marked tokens


@style()
def attention_map(
    rows: Mapping[str, NDArray[Any]], tokens: Sequence[str], marks: Mapping[str, int], folder: Path, head: str
) -> list[Path]:
    """Draw the attention of the query token over the tokens of the prompt: `attention_HEAD.*`.

    Args:
        rows: name (`before training`) -> attention weights (T,); one or two.
        tokens: T decoded tokens. Newlines and spaces are displayed as symbols.
        marks: name (`segment end`) -> position in 0..T-1 to highlight; at most four.
        head: name of the head, such as `L1H2`.
    """
    lines = _wrap(tokens)
    span = max(stop - start for start, stop in lines)
    pitch, height = 1.7, 0.95
    figure = new_figure(max(9.2, 0.75 + 0.25 * span + 0.2), 1.2 + pitch * len(lines))
    note = "Attention weights of the query token over one prompt, which continues from line to line."
    add_heading(figure, f"{head}: attention of the query token", note)
    colours = dict(zip(rows, (GREY, BLUE)[-len(rows) :], strict=True))
    tints = dict(zip(marks, _TINTS, strict=False))
    top = max(0.05, *(float(row.max()) for row in rows.values())) * 1.08
    width = 0.8 / len(rows)  # of a bar; those of a token stand side by side
    shown = [token.translate(_GLYPHS) for token in tokens]
    shown = [text if len(text) <= 10 else text[:9] + "…" for text in shown]
    for number, (start, stop) in enumerate(lines):
        axes = add_axes(figure, 0.75, 1.15 + number * pitch, 0.25 * (stop - start), height)
        axes.set(xlim=(start - 0.5, stop - 0.5), ylim=(0, top))
        axes.grid(axis="y")
        axes.set_ylabel("attention", size=8.5)
        axes.tick_params(axis="y", labelsize=7.5, length=2)
        axes.tick_params(axis="x", length=2, pad=2)
        for index, (name, row) in enumerate(rows.items()):
            x = np.arange(start, stop) + (index - (len(rows) - 1) / 2) * width
            axes.bar(x, row[start:stop], width, color=colours[name], zorder=2)
        axes.set_xticks(range(start, stop), shown[start:stop], family="DejaVu Sans Mono", size=7.5)
        labels = axes.get_xticklabels()
        for label, text in zip(labels, shown[start:stop], strict=True):
            label.set(rotation=0 if len(text) <= 2 else 90, size=10 if text == "⏎" else 7.5)  # two fit side by side
        for name, position in marks.items():
            if start <= position < stop:
                axes.axvspan(position - 0.5, position + 0.5, color=tints[name], alpha=0.4, linewidth=0, zorder=0)
                box = {"facecolor": tints[name], "alpha": 0.55, "edgecolor": "none", "pad": 1}
                labels[position - start].set(weight="bold", bbox=box)
    handles = [Patch(color=colours[name], label=name) for name in rows]
    for name, position in marks.items():
        shares = " → ".join(f"{row[position]:.2f}" for row in rows.values())
        handles.append(Patch(color=tints[name], alpha=0.55, label=f"{name}: {shares}"))
    place = (0.1 / figure.get_figwidth(), 1 - 0.6 / figure.get_figheight())
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=place, ncols=len(handles), fontsize=8.5, borderpad=0
    )
    names = [" and ".join(name for name, position in marks.items() if position == i) for i in range(len(tokens))]
    table = [[i, token, names[i], *(float(row[i]) for row in rows.values())] for i, token in enumerate(tokens)]
    return save(figure, folder, f"attention_{head}", ["position", "token", "mark", *rows], table)


def _wrap(tokens: Sequence[str]) -> list[tuple[int, int]]:
    """Split a prompt into lines (start, stop) of at most `_TOKENS_A_LINE` tokens, preferably after a newline."""
    lines, start = [], 0
    while len(tokens) - start > _TOKENS_A_LINE:
        stop = start + _TOKENS_A_LINE
        near = (i + 1 for i in range(stop - 1, stop - 1 - _TOKENS_A_LINE // 4, -1) if "\n" in tokens[i])
        lines.append((start, next(near, stop)))
        start = lines[-1][1]
    return [*lines, (start, len(tokens))]
