"""Inference cost of each arm by prompt length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from surgery.report.figures.canvas import (
    ARM_LOOKS,
    INK,
    MORE_LOOKS,
    add_axes,
    add_heading,
    new_figure,
    plain_log_ticks,
    save,
    style,
)
from surgery.report.results import ARM_LABELS

Cost = Mapping[str, float]
_NAMES = {**ARM_LABELS, "transformer": "Transformer, same width"}
_PANELS: tuple[tuple[str, str, Callable[[Cost], float]], ...] = (
    ("prefill", "tokens/s", lambda cost: cost["prefill_tokens_per_second"]),
    ("decode", "tokens/s", lambda cost: cost["decode_tokens_per_second"]),
    ("state and KV memory", "KiB", lambda cost: (cost["state_bytes"] + cost["kv_bytes"]) / 1024),
    ("peak memory in prefill", "MiB", lambda cost: cost["peak_bytes"] / 2**20),
)
_COLUMNS = (
    "rows", "tokens", "prefill_tokens_per_second", "time_to_first_token", "decode_tokens_per_second", "spread",
    "peak_bytes", "state_bytes", "kv_bytes",
)  # fmt: skip


@style()
def costs_by_length(arms: Mapping[str, Sequence[Cost]], folder: Path, where: str) -> list[Path]:
    """Draw speed and memory of every arm, one row of panels per batch size: `efficiency.*`.

    Args:
        arms: arm -> its costs, as in results.json.
        where: the device, such as `cpu, 1 thread, float32`.

    Returns:
        The three paths.
    """
    batches = sorted({int(cost["rows"]) for costs in arms.values() for cost in costs})
    figure = new_figure(11.6, 1.2 + 2.25 * len(batches))
    note = f"Random tokens, models timed alternately; {where}. Log axes. Peak memory excludes the weights."
    add_heading(figure, "Inference cost by prompt length", note)
    lines = {}
    for row, batch in enumerate(batches):
        for column, (title, unit, value) in enumerate(_PANELS):
            axes = add_axes(figure, 0.7 + 2.78 * column, 1.0 + 2.25 * row, 2.25, 1.65)
            axes.set_title(
                f"{title}, {unit}" + (f", batch size {batch}" if len(batches) > 1 else ""), size=9, color=INK
            )
            lines = _panel(axes, arms, batch, value)
            if batch == batches[-1]:
                axes.set_xlabel("prompt length (tokens)")
    names = [_NAMES.get(arm, arm.replace("_", " ")) for arm in lines]
    figure.legend(list(lines.values()), names, loc="upper right", ncols=len(lines), fontsize=8.5)
    rows = [[arm, *(cost[name] for name in _COLUMNS)] for arm, costs in arms.items() for cost in costs]
    return save(figure, folder, "efficiency", ["arm", *_COLUMNS], rows)


def _panel(axes: Axes, arms: Mapping[str, Sequence[Cost]], batch: int, value: Callable[[Cost], float]) -> dict:
    """Draw one line per arm, and return them by arm."""
    more, lines, lengths = iter(MORE_LOOKS * len(arms)), {}, set()
    for arm, costs in arms.items():
        colour, marker = ARM_LOOKS.get(arm) or next(more)
        points = sorted((cost["tokens"], value(cost)) for cost in costs if cost["rows"] == batch)
        lengths |= {int(tokens) for tokens, _ in points}
        x, y = zip(*points, strict=True)
        (lines[arm],) = axes.plot(x, y, color=colour, marker=marker, markersize=4.5, linewidth=1.6)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(lengths), [str(n) for n in sorted(lengths)])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="minor", length=0)
    low, high = axes.get_ylim()
    if high / low < 4:  # otherwise nearly equal lines would show noise at full height
        axes.set_ylim((low * high) ** 0.5 / 2, (low * high) ** 0.5 * 2)
    plain_log_ticks(axes.yaxis)
    axes.grid()
    return lines
