"""Rows, and the columns of a row, a file or a data set that a recipe reads."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surgery.errors import DataError
from surgery.recipe import Columns

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One row: a line of JSON, or a mapping.

    Attributes:
        where: file and line, or data set and row, for messages.
        raw: bytes of JSON, or columns with values.
    """

    where: str
    raw: bytes | Mapping[str, Any]

    def fields(self) -> Mapping[str, Any]:
        """Parse the row into values by column. Raise DataError if the line is not a JSON object."""
        if not isinstance(self.raw, bytes):
            return self.raw
        if b"\0" in self.raw:
            raise DataError(
                self.where, "NUL bytes", "The file is damaged, or not UTF-8. Save it in UTF-8 without them."
            )

        def columns_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            found = dict(pairs)
            if len(found) < len(pairs):
                _note_repeated(self.where, Counter(key for key, _ in pairs).most_common(1)[0][0])
            return found

        try:
            columns = json.loads(self.raw, object_pairs_hook=columns_of)
        except (ValueError, RecursionError) as error:
            raise not_json(self.where, error, "Write one JSON object per line.") from None
        if not isinstance(columns, dict):
            hint = 'Write one JSON object per line, such as {"prompt": ..., "answer": ...}.'
            raise DataError(self.where, f"a JSON {type(columns).__name__}, not an object", hint)
        return columns


_REPEATED: set[str] = set()  # files whose repeated keys were noted


def _note_repeated(where: str, key: str) -> None:
    """Note the first row of a file that has a key twice. Rows are parsed again in every epoch."""
    file = where.rpartition(":")[0]
    if file not in _REPEATED:
        _LOG.warning("%s: the key %r is there twice, and the last value counts. Keep one.", where, key)
    _REPEATED.add(file)


def not_json(where: str, error: Exception, hint: str) -> DataError:
    """Return the error for text that cannot be parsed."""
    if isinstance(error, UnicodeDecodeError):
        return DataError(where, "not UTF-8", "Save the file in UTF-8.")
    return DataError(where, f"not JSON: {error}", hint)


def column_names(columns: Columns, available: Sequence[str], where: str) -> list[str]:
    """List the columns to read.

    Args:
        available: columns of the file or data set.
        where: its name, for the error message.

    Raises:
        DataError: a column is missing.
    """
    if columns.text is not None:
        wanted = {"text": columns.text}
    elif columns.messages is not None:
        wanted = {"messages": columns.messages}
    else:
        wanted = {"prompt": columns.prompt, "answer": columns.answer}
    span = columns.span_column if columns.text is None else None
    if span is not None and (span in available or not columns.finds_spans):
        wanted["answer_span"] = span
    for key, name in wanted.items():
        if name not in available:
            raise DataError(where, f"no column {name!r}", f"The columns are {names_of_columns(available, key)}")
    return list(wanted.values())


def wrapped_rows(value: Any, columns: Columns, place: str = "") -> str:
    """Find the list of rows inside a JSON object without any column of a row. Returns its place, such as `["data"]`."""
    if place.count("[") > 3:
        return ""
    if isinstance(value, list):
        row = value[0] if value and isinstance(value[0], dict) else {}
        return place if row and not {"role", "from"} & row.keys() else ""  # not one chat
    if not isinstance(value, dict) or {columns.text, columns.messages, columns.prompt, columns.answer} & value.keys():
        return ""
    places = (wrapped_rows(inner, columns, f"{place}[{json.dumps(key)}]") for key, inner in value.items())
    return next(filter(None, places), "")


def names_of_columns(available: Iterable[Any], key: str) -> str:
    """List the columns of a row or a data set, and say how to name the one that `data.columns.KEY` needs."""
    names = [str(name) for name in available]
    texts = (
        [str(name) for name, text in available.items() if isinstance(text, str)]
        if isinstance(available, Mapping)
        else names
    )
    sections, setting = ["train.sources.0.data", "locate.data"], f"columns.{key}=NAME"
    if key == "prompt" and "messages" in names:
        setting = "columns.messages=messages"
    elif key == "prompt" and "text" in names:
        sections, setting = sections[:1], "columns={text: text}"  # prompts for locating need answers
    elif key == "prompt" and texts:
        setting = f"columns.prompt={texts[0]}"
    settings = " or ".join(f"{section}.{setting}" for section in sections)
    return f"{', '.join(names) or 'nothing'}. Set `data.columns`, such as {settings}."
