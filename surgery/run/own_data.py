"""Describe the user's own file as a source of training: its columns, and the share of answers that have a place."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from surgery.data.files import local_files, rows_in_order
from surgery.data.user import count_answer_spans, read_documents
from surgery.errors import DataError
from surgery.recipe import Data, Source, Train

_HOLDOUT = 0.1
_TEXT_TOKENS = 512  # of a piece of plain text
# Columns to look for, in this order, with `data.columns` for them.
_FORMS: tuple[tuple[set[str], dict[str, Any]], ...] = (
    ({"prompt", "answer"}, {"answer_span": "auto"}),
    ({"messages"}, {"messages": "messages", "answer_span": "auto"}),
    ({"text"}, {"text": "text"}),
)


def source_of_file(
    path: str, tokenizer: PreTrainedTokenizerBase, context: int | None, vocab_size: int
) -> tuple[dict[str, Any], str]:
    """Read the user's data and describe it as a source, as plain data, with the reason for its weights.

    Raises:
        DataError: the file cannot be read, its columns are unknown, or a row cannot be used.
    """
    columns = _columns_of(path)
    data: dict[str, Any] = {"path": path, "columns": columns}
    given: dict[str, Any] = {"context": context, "vocab_size": vocab_size}
    if "text" in columns:
        most = min(context or _TEXT_TOKENS, _TEXT_TOKENS)
        read_documents(Data.model_validate(data), tokenizer, most, **given)
        source = {"data": data, "rows": 4, "max_tokens": most, "weights": {"base_kl": 1.0}}
        return source, "Your texts: the hybrid keeps what the base predicts on them."
    weights = {"answer": 1.0, "attention": 1.0}
    source = {"data": data, "rows": 8, "weights": weights}
    held_out = f"{_HOLDOUT:.0%} of the prompts are held out and evaluated."
    data["holdout"] = _HOLDOUT
    try:
        rows, _ = read_documents(Data.model_validate(data), tokenizer, **given)
        read_documents(Data.model_validate(data), tokenizer, limit=1, held_out=True, **given)
    except DataError:
        del data["holdout"]
        held_out = "Too few prompts to hold some out."
        rows, _ = read_documents(Data.model_validate(data), tokenizer, **given)
    section = Train(sources=(Source.model_validate(source),))
    counts = next(iter(count_answer_spans(section, tokenizer, **given).values()), {"marked": len(rows)})
    placed, total = counts.get("found", 0) + counts.get("marked", 0), sum(counts.values())
    if not placed:
        del weights["attention"]
        reason = f"no answer of {total} occurs once in its prompt, so attention is not supervised on it"
    else:
        reason = f"{placed} of {total} answers occur once in their prompt, where attention is supervised"
    return source, f"Your data: {reason}. {held_out}"


def _columns_of(path: str) -> dict[str, Any]:
    """Find which of the known columns a file has. Returns `data.columns`."""
    local_files(Data(path=path))
    failure: DataError | None = None
    names: set[str] = set()
    for needed, columns in _FORMS:
        try:
            row = next(rows_in_order(Data.model_validate({"path": path, "columns": columns})), None)
            if row is None:
                raise DataError(path, "no rows", "Add at least one.")
            names = set(row.fields())
        except DataError as error:
            failure = failure or error
            continue
        if needed <= names:
            return columns
    if not names and failure is not None:
        raise failure
    hint = "Name them prompt and answer, messages, or text, or write data.columns into a recipe (docs/your-data.md)."
    raise DataError(path, f"its columns are {', '.join(sorted(names))[:100]}", hint)
