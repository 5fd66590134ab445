"""Make any text visible in one line, format times and numbers of bytes, and write tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surgery.files.atomic import write_text

_CUT = " ... "


def cut_middle(text: str, limit: int) -> str:
    """Return at most `limit` characters: the start and the end of a longer text, with ` ... ` between."""
    if len(text) <= limit:
        return text
    tail = (limit - len(_CUT)) // 2
    return text[: limit - len(_CUT) - tail] + _CUT + text[len(text) - tail :]


def visible(text: str, limit: int) -> str:
    """Return a text in one line of at most `limit` characters, as `cut_middle` does.

    Characters that do not print are shown as escapes: line ends, control and direction characters, spaces other than
    the plain one. A backslash is doubled.
    """
    return cut_middle("".join(map(_escaped, text)), limit)


def _escaped(char: str) -> str:
    return char if char.isprintable() and char != "\\" else char.encode("unicode_escape").decode()


def duration_text(seconds: float) -> str:
    """Format a time: `90 s`, `7 min`, `3 h 20 min`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def write_rows(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Path:
    """Write a table as CSV, and return its path."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    write_text(path, text.getvalue())
    return path


def size_text(count: int) -> str:
    """Format a number of bytes."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:,} B"
