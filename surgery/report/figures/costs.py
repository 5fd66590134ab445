"""Inference cost of each arm by prompt length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from surgery.report.figures.canvas import (
    add_axes,
    add_heading,
    log2_ticks,
    looks_of,
    new_figure,
    plain_log_ticks,
    save,
    style,
)
from surgery.report.results import ARM_LABELS

Cost = Mapping[str, float]
_NAMES = {**ARM_LABELS, "transformer": "Transformer, same width"}
_PANELS: dict[str, Callable[[Cost], float]] = {
    "prefill, tokens/s": lambda cost: cost["prefill_tokens_per_second"],
    "decode, tokens/s": lambda cost: cost["decode_tokens_per_second"],
    "state and KV memory, KiB": lambda cost: (cost["state_bytes"] + cost["kv_bytes"]) / 1024,
    "peak memory in prefill, MiB": lambda cost: cost["peak_bytes"] / 2**20,
}
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
    """
    batches = sorted({int(cost["rows"]) for costs in arms.values() for cost in costs})
    lengths = sorted({int(cost["tokens"]) for costs in arms.values() for cost in costs})
    figure = new_figure(11.6, 1.2 + 2.25 * len(batches))
    note = f"Random tokens, models timed alternately; {where}. Log axes. Peak memory excludes the weights."
    add_heading(figure, "Inference cost by prompt length", note)
    looks = looks_of(list(arms))
    for row, batch in enumerate(batches):
        of_batch = f", batch size {batch}" if len(batches) > 1 else ""
        for column, (title, value) in enumerate(_PANELS.items()):
            axes = add_axes(figure, 0.7 + 2.78 * column, 1.0 + 2.25 * row, 2.25, 1.65)
            axes.set_title(f"{title}{of_batch}", size=9)
            for arm, (colour, marker) in looks.items():
                costs = sorted((cost for cost in arms[arm] if cost["rows"] == batch), key=lambda cost: cost["tokens"])
                x, y = [cost["tokens"] for cost in costs], [value(cost) for cost in costs]
                axes.plot(x, y, color=colour, marker=marker, markersize=4.5, linewidth=1.6)
            log2_ticks(axes, lengths)
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            if high / low < 4:  # otherwise nearly equal lines would show noise at full height
                axes.set_ylim((low * high) ** 0.5 / 2, (low * high) ** 0.5 * 2)
            plain_log_ticks(axes.yaxis)
            axes.grid()
            if batch == batches[-1]:
                axes.set_xlabel("prompt length (tokens)")
    names = [_NAMES.get(arm, arm.replace("_", " ")) for arm in arms]
    figure.legend(figure.axes[0].lines, names, loc="upper right", ncols=len(arms), fontsize=8.5)
    rows = [[arm, *(cost[name] for name in _COLUMNS)] for arm, costs in arms.items() for cost in costs]
    return save(figure, folder, "efficiency", ["arm", *_COLUMNS], rows)
