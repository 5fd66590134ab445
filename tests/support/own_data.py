"""Rows of the user's own in files, and the streams that read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow.parquet import write_table

from surgery.data.generated import Stream
from surgery.data.user import open_source
from surgery.recipe import Source
from tests.support.pico import pico_tokenizer

TOKENIZER = pico_tokenizer()
END = TOKENIZER.eos_token


def write(path: Path, rows: list[Any]) -> Path:
    """Rows as JSON lines; text is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def stored(path: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows in the format of the name."""
    if path.suffix == ".parquet":
        write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        write(path, rows)
    return path


def numbered(count: int, words: int = 0) -> list[dict[str, str]]:
    return [{"prompt": f"row {i}{' x' * (i % 5 * words)}\nis", "answer": str(i)} for i in range(count)]


def source(path: Path | str, rows: int | None = 4, tokens: int | None = None, **data: Any) -> Source:
    limit = {"max_tokens": data.pop("max_tokens")} if "max_tokens" in data else {}
    sizes = {"tokens": tokens} if tokens is not None else {"rows": rows}
    return Source.model_validate({"data": {"path": str(path), **data}, "weights": {"base_kl": 1.0}, **sizes, **limit})


def opened(path: Path | str, rows: int | None = 4, seed: int = 0, index: int = 0, **given: Any) -> Stream:
    return open_source(source(path, rows, **given), TOKENIZER, seed, index)


def texts(stream: Stream, step: int) -> list[str]:
    return [d.text for d in stream.step(step)]


def fake_hub(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[tuple[Any, ...]]:
    """`load_dataset` gives, or raises, `answer`; returns what it is asked for."""
    asked: list[tuple[Any, ...]] = []

    def load(path: str, name: str | None, split: str, revision: str | None, streaming: bool) -> Any:
        asked.append((path, name, split, revision, streaming))
        if isinstance(answer, Exception):
            raise answer
        return answer.to_iterable_dataset(num_shards=2) if streaming else answer

    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked
