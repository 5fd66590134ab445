"""Print the results of the bench as text tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.env import Row
from bench.gpu.store import Store

_APART = ("forward", "decode", "gradient")
COLUMNS = {
    "environment": ("what", "found"),
    "speed": ("shape", "task", "unit", "base", "hybrid", "ratio", "spread", "base GiB", "hybrid GiB"),
    "loop": ("shape", "loop", "tokens/s", "of plain", "ms/step", "tokens/step"),
    "quickstart": ("what", "found", "ok"),
    "training": ("shape", "task", "kind", "unit", "base", "hybrid", "ratio", "base GiB", "hybrid GiB", "apart", "ok"),
    "locate": ("shape", "heads", "methods", "prompts", "passes", "seconds", "again", "GiB"),
    "correctness": ("family", "mode", "dtype", *_APART, "tensor", "x cpu", "ok", "differs most"),
    "behaviour": ("family", "silenced head", "hooks, eval", "hooks, training", "ok", "packing"),
    "attention": ("implementation", "widths", "prompts", *_APART, "x eager", "ok"),
}
LEGENDS = {
    "speed": "ratio: time of the hybrid over time of the base; spread: interquartile range over median",
    "loop": "of plain: tokens/s over those of the plain loop with about as many tokens in a step",
    "training": "a whole step of the loop; apart: largest relative difference of a loss from that of the plain run",
    "locate": "again: seconds of the same call a second time, when all kernels are compiled",
    "correctness": "relative to the CPU in fp32 with the same weights; x cpu: over the CPU's own error in bf16",
    "attention": "relative to eager in fp32; x eager: over eager's own error in this dtype; after the prompt, "
    "decode is one code for eager and all sdpa",
}
Sections = dict[str, list[Row]]


def sections(store: Store, parts: Mapping[str, str]) -> Sections:
    """Rows and lines of all results so far, by table.

    Args:
        parts: name of a part's results -> table of its rows that name none.
    """
    found: Sections = {name: [] for name in COLUMNS}
    machines: dict[str, int] = {}
    for name, table in {"environment": "environment", **parts}.items():
        for entry in store.entries(name).values():
            machines[entry["machine"]] = machines.get(entry["machine"], 0) + (name != "environment")
            for row in entry["rows"]:
                found[row.get("table", table)].append(row)
    if sum(count > 0 for count in machines.values()) > 1:
        found["environment"] += [{"line": f"{count} results: {m}"} for m, count in machines.items() if count]
    return found


def failed(found: Sections) -> int:
    """Number of rows that are not as they should be."""
    return sum(bool(row.get("failed")) or not row.get("ok", True) for rows in found.values() for row in rows)


def progress(
    wanted: Mapping[str, list[str]], left: Mapping[str, list[str]], failures: int, command: str, folder: Path
) -> str:
    """What is done, what is left, and the command for it."""
    lines = [f"{name}: {len(wanted[name]) - len(left[name])} of {len(wanted[name])} done" for name in wanted]
    verdict = f"{failures} NOT as they should be: see NO and failed above" if failures else "all as it should be"
    rest = [f"left: {name} {item}" for name, items in left.items() for item in items[:3]]
    then = f"next: {command}" if rest else "nothing is left"
    return "\n".join(["", "; ".join(lines), *rest, f"{folder}: {verdict}; {then}"])


def text(found: Sections) -> str:
    """Format all sections, one after the other."""
    return "\n".join(part for name in COLUMNS if found[name] for part in _section(name, found[name]))


def _section(name: str, found: list[Row]) -> list[str]:
    rows = [_derived(row) for row in found if "line" not in row]
    legend = f" ({LEGENDS[name]})" if name in LEGENDS and rows else ""
    lines = merged([row for row in found if "line" in row])
    return ["", f"{name}{legend}", *aligned(COLUMNS[name], rows), *ran(rows), *lines]


def _derived(row: Row) -> Row:
    """Add a column with the largest error, as a multiple of the error of the CPU or of eager attention."""
    for yardstick, column in (("cpu", "x cpu"), ("eager", "x eager")):
        own = row.get(yardstick)
        if own:
            times = [float(row[what]) / value for what, value in own.items() if value and row.get(what) is not None]
            row = {**row, column: max(times) if times else None}
    return row


def aligned(columns: Sequence[str], rows: Sequence[Row]) -> list[str]:
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
            subject = row.get("family") or " ".join([row["shape"], *row.get("task", "").split()[:1]])
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
