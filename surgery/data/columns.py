"""The columns of a row, a file or a data set that a recipe reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from surgery.errors import DataError
from surgery.recipe import Columns


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
