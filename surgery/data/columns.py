"""Rows, and the columns of a row, a file or a data set that a recipe reads."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from surgery.errors import DataError
from surgery.recipe import Columns

_LOG = logging.getLogger(__name__)
_REPEATED: set[str] = set()  # files whose repeated keys were noted: rows are parsed again in every epoch


class Row(NamedTuple):
    """One row.

    Attributes:
        where: file and line, or data set and row, for messages.
        raw: a line of JSON, or columns with values.
    """

    where: str
    raw: bytes | Mapping[str, Any]

    def fields(self) -> Mapping[str, Any]:
        """Parse the row into values by column. Raise DataError if the line is not a JSON object."""
        if not isinstance(self.raw, bytes):
            return self.raw
        if b"\0" in self.raw:
            hint = "The file is damaged, or not UTF-8. Save it in UTF-8 without them."
            raise DataError(self.where, "NUL bytes", hint)
        try:
            columns = parsed(self.raw, self.where, self.where.rpartition(":")[0])
        except (ValueError, RecursionError) as error:
            raise not_json(self.where, error, "Write one JSON object per line.") from None
        if not isinstance(columns, dict):
            hint = 'Write one JSON object per line, such as {"prompt": ..., "answer": ...}.'
            raise DataError(self.where, f"a JSON {type(columns).__name__}, not an object", hint)
        return columns


def parsed(text: bytes, where: str, file: str) -> Any:
    """Parse JSON. Notes the first key of a file that an object has twice, and `where`."""

    def an_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        columns = dict(pairs)
        if len(columns) < len(pairs) and file not in _REPEATED:
            _REPEATED.add(file)
            ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
            _LOG.warning("%s: the key %r is there twice, and the last value counts. Keep one.", where, key)
        return columns

    return json.loads(text, object_pairs_hook=an_object)


def not_json(where: str, error: Exception, hint: str) -> DataError:
    """Return the error for text that cannot be parsed."""
    if isinstance(error, UnicodeDecodeError):
        return DataError(where, "not UTF-8", "Save the file in UTF-8.")
    return DataError(where, f"not JSON: {error}", hint)


def column_names(columns: Columns, available: Sequence[str], where: str) -> list[str]:
    """List the columns to read of the file or data set `where`. Raise DataError if one of them is not available."""
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


def names_of_columns(available: Iterable[Any], key: str) -> str:
    """List the columns of a row or a data set, and say how to name the one that `data.columns.KEY` needs."""
    names = [str(name) for name in available]
    texts = names
    if isinstance(available, Mapping):
        texts = [str(name) for name, text in available.items() if isinstance(text, str)]
    sections, setting = ["train.sources.0.data", "locate.data"], f"columns.{key}=NAME"
    if key == "prompt" and "messages" in names:
        setting = "columns.messages=messages"
    elif key == "prompt" and "text" in names:
        sections, setting = sections[:1], "columns={text: text}"  # prompts for locating need answers
    elif key == "prompt" and texts:
        setting = f"columns.prompt={texts[0]}"
    settings = " or ".join(f"{section}.{setting}" for section in sections)
    return f"{', '.join(names) or 'nothing'}. Set `data.columns`, such as {settings}."
