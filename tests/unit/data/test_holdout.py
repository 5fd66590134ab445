"""Rows that are never trained on: which ones, that the sides do not meet, and that nobody is left without rows."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from surgery.data.documents import is_held_out
from surgery.data.user import open_source, read_documents
from surgery.errors import DataError
from surgery.evaluate.evaluation import held_out_documents
from surgery.probes.documents import Document
from surgery.recipe import Source, Train
from tests.support.pico import pico_tokenizer

TOKENIZER = pico_tokenizer()
PROMPTS = [f"Who has ticket {i}?\n" for i in range(200)]


def file_of(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return file_of(tmp_path / "rows.jsonl", [{"prompt": p, "answer": str(i)} for i, p in enumerate(PROMPTS)])


def source(path: Path, holdout: float, rows: int = 10, **data: Any) -> Source:
    given = {"path": str(path), "holdout": holdout, **data}
    return Source.model_validate({"data": given, "rows": rows, "weights": {"base_kl": 1.0}})


def prompt(document: Document) -> str:
    return document.text[: document.questions[0].answer[0]] if document.questions else document.text


def trained_on(made: Source, steps: int, seed: int = 0) -> set[str]:
    stream = open_source(made, TOKENIZER, seed, 0)
    return {prompt(d) for step in range(steps) for d in stream.step(step)}


def held_out(made: Source) -> set[str]:
    assert made.data is not None
    return {prompt(d) for d in read_documents(made.data, TOKENIZER, made.max_tokens, held_out=True)[0]}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_held_out_is_never_trained_on(rows: Path, streaming: bool, seed: int) -> None:
    """Over several passes; together the sides are all there is."""
    made = source(rows, 0.25, streaming=streaming, buffer=16)
    asked, trained = held_out(made), trained_on(made, 45, seed)
    assert not asked & trained and asked | trained == set(PROMPTS)
    assert 30 <= len(asked) <= 70, "a quarter of 200, give or take"


def test_equal_prompts_are_on_one_side_whatever_their_answers(tmp_path: Path) -> None:
    twice = [{"prompt": p, "answer": answer} for answer in ("yes", "no") for p in PROMPTS[:60]]
    made = source(file_of(tmp_path / "twice.jsonl", twice), 0.3)
    assert made.data is not None
    documents, _ = read_documents(made.data, TOKENIZER, held_out=True)
    asked = [prompt(d) for d in documents]
    assert len(asked) == 2 * len(set(asked)) > 0
    assert not set(asked) & trained_on(made, 12)


def test_nothing_is_held_out_unless_it_is_asked_for(rows: Path) -> None:
    assert trained_on(source(rows, 0.0), 20) == set(PROMPTS)
    with pytest.raises(DataError, match="no rows"):
        held_out(source(rows, 0.0))


def test_a_greater_share_keeps_what_a_smaller_one_held_out(rows: Path) -> None:
    shares = [{p for p in PROMPTS if is_held_out(p, share)} for share in (0.0, 0.1, 0.5, 0.9)]
    assert shares[0] == set() and all(a < b for a, b in pairwise(shares))
    assert held_out(source(rows, 0.1)) == shares[1]


def test_whole_texts_are_held_out_not_their_pieces(tmp_path: Path) -> None:
    texts = [f"The old baker went to the market {i} times. " * 4 for i in range(60)]
    path = file_of(tmp_path / "texts.jsonl", [{"text": t} for t in texts])
    given = {"path": str(path), "holdout": 0.3, "columns": {"text": "text"}, "end": False}
    made = Source.model_validate({"data": given, "rows": 10, "max_tokens": 20, "weights": {"lm": 1.0}})
    asked, trained = held_out(made), trained_on(made, 60)
    of = [{i for i in range(60) if any(f"market {i} times" in piece for piece in side)} for side in (asked, trained)]
    assert not of[0] & of[1] and of[0] | of[1] == set(range(60)) and of[0]


@pytest.mark.parametrize(("share", "side"), [(0.999999, "left for training"), (0.000001, "held out")])
def test_a_side_without_rows_is_refused(rows: Path, share: float, side: str) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl: no row is {side}.*another share"):
        (trained_on if "train" in side else lambda made, _: held_out(made))(source(rows, share), 1)


def train_of(*paths: Path, holdout: float = 0.2) -> Train:
    return Train(sources=tuple(source(path, holdout) for path in paths))


def test_evaluation_asks_them_by_name(tmp_path: Path, rows: Path) -> None:
    """Each data set once, however often it is listed; two files of one name are told apart."""
    (tmp_path / "more").mkdir()
    other = file_of(tmp_path / "more" / "rows.jsonl", [{"prompt": p + "And?\n", "answer": "x"} for p in PROMPTS])
    found = held_out_documents(train_of(rows, other, rows), TOKENIZER, limit=5)
    assert {name: len(documents) for name, documents in found.items()} == {"rows.jsonl": 5, "rows.jsonl (2)": 5}
    assert {prompt(d) for d in found["rows.jsonl"]} <= held_out(source(rows, 0.2))
    assert held_out_documents(train_of(rows, holdout=0.0), TOKENIZER, limit=5) == {}
