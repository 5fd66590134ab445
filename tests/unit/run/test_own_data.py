"""The user's file as a source of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surgery.errors import DataError
from surgery.recipe import Source
from surgery.run.own_data import source_of_file
from tests.support.own_data import write
from tests.support.pico import pico_tokenizer

ROW = {"prompt": "The number of Balo is 42.\nThe number of Balo is", "answer": " 42"}


def read(path: Path, *rows: Any) -> tuple[dict[str, Any], str]:
    return source_of_file(str(write(path / "mine.jsonl", list(rows))), pico_tokenizer(), None, 1024)


def test_answers_with_a_place_are_supervised_and_some_are_held_out(tmp_path: Path) -> None:
    rows = [{**ROW, "prompt": ROW["prompt"].replace("Balo", f"Balo{i}")} for i in range(60)]
    source, reason = read(tmp_path, *rows)
    assert source["weights"] == {"answer": 1.0, "attention": 1.0} and source["data"]["holdout"] == 0.1
    assert "answers occur once" in reason and Source.model_validate(source).data is not None


def test_answers_without_a_place_train_answers_alone(tmp_path: Path) -> None:
    source, reason = read(tmp_path, {"prompt": "What is it?", "answer": " a cat"})
    assert source["weights"] == {"answer": 1.0} and "not supervised" in reason
    assert "holdout" not in source["data"] and "Too few" in reason


def test_all_rows_of_one_prompt_train(tmp_path: Path) -> None:
    """Whether its hash holds it out or not."""
    for name in (f"B{i}" for i in range(12)):
        source, reason = read(tmp_path, *[{**ROW, "prompt": ROW["prompt"].replace("Balo", name)}] * 3)
        assert "holdout" not in source["data"] and "3 of 3" in reason and "Too few" in reason, name


def test_plain_texts_are_kept(tmp_path: Path) -> None:
    source, _ = read(tmp_path, {"text": "A cat slept."})
    assert source["weights"] == {"base_kl": 1.0} and Source.model_validate(source).max_tokens == 512


def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    for rows, hint in (
        ((), "no rows"),
        (("not json",), "not JSON"),
        (({"question": "a", "reply": "b"},), "question, reply"),
        ((ROW, {"prompt": "x", "answer": ""}), "answer is empty"),
    ):
        with pytest.raises(DataError, match=hint):
            read(tmp_path, *rows)
    with pytest.raises(DataError, match="No such file"):
        source_of_file("nowhere.jsonl", pico_tokenizer(), None, 1024)
