"""Make any text visible in one line, format times and numbers of bytes, and write tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surgery.files.atomic import write_text

_CUT = " ... "
_SHORT = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\"}


def cut_middle(text: str, limit: int) -> str:
    """Return at most `limit` characters: the start and the end of a longer text, with ` ... ` between."""
    if len(text) <= limit:
        return text
    head, tail = _halves(limit)
    return text[:head] + _CUT + text[len(text) - tail :]


def visible(text: str, limit: int) -> str:
    """Return a text in one line of at most `limit` characters, at least 7.

    Characters that do not print are shown as escapes: line ends, control and direction characters, spaces other than
    the plain one. A backslash is doubled. A longer text is cut in the middle, not inside an escape.
    """
    is_long = len(text) > 2 * limit  # each character is shown as one or more
    shown = [_escaped(char) for char in (text[:limit] + text[-limit:] if is_long else text)]
    if not is_long and sum(map(len, shown)) <= limit:
        return "".join(shown)
    head, tail = _halves(limit)
    return "".join(_fitting(shown, head)) + _CUT + "".join(reversed(_fitting(shown[::-1], tail)))


def _escaped(char: str) -> str:
    if char in _SHORT:
        return _SHORT[char]
    return char if char.isprintable() else char.encode("unicode_escape").decode()


def _halves(limit: int) -> tuple[int, int]:
    """Numbers of characters to keep at the start and at the end."""
    kept = limit - len(_CUT)
    return kept - kept // 2, kept // 2


def _fitting(parts: Sequence[str], room: int) -> list[str]:
    """Return the first parts that fit into `room` characters together."""
    fitting: list[str] = []
    for part in parts:
        room -= len(part)
        if room < 0:
            break
        fitting.append(part)
    return fitting


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
