"""Own prompts for locating: rows with a place of the answer, and the tokens that it competes with."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from surgery.data.own_prompts import own_batches, own_prompts
from surgery.data.ranking import ranked
from surgery.errors import DataError
from surgery.recipe import Data
from tests.support.own_data import write
from tests.support.pico import pico_base, pico_tokenizer

ROWS = [{"prompt": f"a:{n}\nb:{n + 1}\nThe value of b is", "answer": str(n + 1)} for n in range(20, 60, 2)]


def written(folder: Path, rows: list[dict[str, Any]]) -> Data:
    return Data(path=str(write(folder / "own.jsonl", rows)), columns={"answer_span": "auto"})


def test_rows_without_a_place_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unplaced = [{"prompt": "a:1\nThe value of b is", "answer": "77"}, {"prompt": "The value is 77", "answer": "77"}]
    data = written(tmp_path, [*ROWS, *unplaced, {"prompt": "a:1\n", "answer": ""}])
    with caplog.at_level(logging.WARNING):
        assert len(own_prompts(data.model_copy(update={"on_bad_row": "skip"}), pico_tokenizer(), 500)) == len(ROWS)
    assert f"2 of {len(ROWS) + 2} rows" in caplog.text and "1 rows cannot be used and are skipped" in caplog.text
    with pytest.raises(DataError, match="no row has the place of its answer"):
        own_prompts(written(tmp_path, [{"prompt": "a:1\nThe value of b is", "answer": "77"}]), pico_tokenizer(), 5)


def test_an_answer_competes_with_its_prompt_and_the_other_answers(tmp_path: Path) -> None:
    tokenizer = pico_tokenizer()
    model = pico_base(vocab_size=len(tokenizer)).eval()
    documents = own_prompts(written(tmp_path, ROWS), tokenizer, 500)
    batches = own_batches(documents, tokenizer, 8)
    assert [document for chunk, _ in batches for document in chunk] == documents
    answers = {int(t) for _, batch in batches for t in batch.target[:, 0]}
    margins = ranked(model, [batch for _, batch in batches]).margin
    for document, margin in zip(documents, margins, strict=True):
        prompt = document.text[: document.questions[0].answer[0]]
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        (gold,) = tokenizer(document.text[slice(*document.questions[0].answer)], add_special_tokens=False)["input_ids"][
            :1
        ]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        others = sorted(({*ids} | answers) - {gold})
        torch.testing.assert_close(margin, logits[gold] - logits[others].max(), rtol=1e-4, atol=1e-4)


def test_in_prompts_of_one_line_both_gold_positions_are_before_the_query(tmp_path: Path) -> None:
    tokenizer = pico_tokenizer()
    for end in ("", "\n", "\n\n"):
        rows = [{"prompt": f"a is {n}; b is {n + 1}; b is:{end}", "answer": str(n + 1)} for n in range(20, 40)]
        ((_, batch),) = own_batches(own_prompts(written(tmp_path, rows), tokenizer, 20), tokenizer, 20)
        assert bool((batch.answer_token >= 0).all()) and bool((batch.answer_token <= batch.segment_end).all())
        assert bool((batch.segment_end < batch.query).all())


def test_a_space_before_the_answer_is_not_what_the_base_is_asked_for(tmp_path: Path) -> None:
    """The same batch, whether the space ends the prompt or begins the answer."""
    tokenizer = pico_tokenizer()
    assert len(tokenizer(" 42")["input_ids"]) == 2, "the space is a token of its own"
    rows = [{**row, "answer": f" {row['answer']}"} for row in ROWS]
    moved = [{"prompt": f"{row['prompt']} ", "answer": row["answer"]} for row in ROWS]
    batches = [
        own_batches(own_prompts(written(tmp_path, found), tokenizer, 500), tokenizer, 32)[0][1]
        for found in (rows, moved)
    ]
    for name in ("input_ids", "query", "target", "answer_token", "segment_end", "choice_ids"):
        assert torch.equal(getattr(batches[0], name), getattr(batches[1], name)), name
    assert [tokenizer.decode(target) for target in batches[0].target[:3, 0]] == ["21", "23", "25"]
