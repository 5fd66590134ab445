"""Print the results of the bench as text tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.gpu.env import Row

_APART = ("forward", "decode", "gradient")
COLUMNS = {
    "environment": ("what", "found"),
    "build": ("package", "result", "seconds"),
    "correctness": ("family", "mode", "dtype", *_APART, "tensor", "x cpu", "ok", "differs most"),
    "behaviour": ("family", "silenced head", "hooks, eval", "hooks, training", "ok", "packing"),
    "attention": ("implementation", "widths", "prompts", *_APART, "x eager", "ok"),
    "speed": ("shape", "task", "unit", "base", "hybrid", "ratio", "spread", "base GiB", "hybrid GiB"),
    "training": ("shape", "task", "kind", "unit", "base", "hybrid", "ratio", "base GiB", "hybrid GiB", "apart", "ok"),
}
LEGENDS = {
    "correctness": "relative to the CPU in fp32 with the same weights; x cpu: over the CPU's own error in bf16",
    "attention": "relative to eager in fp32; x eager: over eager's own error in this dtype",
    "speed": "ratio: time of the hybrid over time of the base; spread: interquartile range over median",
    "training": "a whole step of the loop; apart: largest relative difference of a loss from that of the plain run",
}


def text(sections: dict[str, dict[str, Any]]) -> str:
    """Format all sections, one after the other."""
    return "\n".join(part for name in COLUMNS for part in _section(name, sections[name]))


def _section(name: str, section: dict[str, Any]) -> list[str]:
    rows = [_derived(row) for row in section["rows"]]
    legend = f" ({LEGENDS[name]})" if name in LEGENDS and rows else ""
    found = [*_aligned(COLUMNS[name], rows), *ran(rows), *merged(section["lines"])]
    return ["", f"{name}{legend}", *(found or ["- not requested"])]


def _derived(row: Row) -> Row:
    """Add a column with the largest error, as a multiple of the error of the CPU or of eager attention."""
    for yardstick, column in (("cpu", "x cpu"), ("eager", "x eager")):
        own = row.get(yardstick)
        if own:
            times = [float(row[what]) / value for what, value in own.items() if value and row.get(what) is not None]
            row = {**row, column: max(times) if times else None}
    return row


def _aligned(columns: Sequence[str], rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    cells = [list(columns), *([shown(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def shown(value: Any) -> str:
    """Format a number with three digits."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-2 else f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def ran(rows: Sequence[Row]) -> list[str]:
    """List the packages whose code ran the recurrences, each with the rows that used it."""
    answers: dict[str, list[str]] = {}
    for row in rows:
        if "ran" in row:
            subject = row.get("family") or f"{row['shape']} {row['task'].split()[0]}"
            subjects = answers.setdefault(row["ran"], [])
            subjects += [] if subject in subjects else [subject]
    return [f"ran in {', '.join(subjects)}: {answer}" for answer, subjects in answers.items()]


def merged(lines: Sequence[Row]) -> list[str]:
    """Merge lines with the same text about several items."""
    said: dict[str, list[str]] = {}
    for row in lines:
        subject, _, what = row["line"].partition(": ")
        said.setdefault(what or subject, []).append(subject)
    return [f"- {', '.join(dict.fromkeys(subjects))}: {what}" for what, subjects in said.items()]
