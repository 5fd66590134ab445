"""What decides which rows are held out, and what must not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from surgery.data.documents import Reader
from surgery.data.files import local_files, open_rows, rows_in_order
from surgery.data.user import named_data, read_documents
from surgery.recipe import Data, Recipe, Train
from tests.support.pico import pico_tokenizer


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


def source(path: Path | str, **data: Any) -> dict[str, Any]:
    return {"data": {"path": str(path), **data}, "rows": 1, "weights": {"answer": 1.0}}


def test_the_text_of_a_chat_template_does_not(tmp_path: Path) -> None:
    """A template may print the date. The same questions without a template are held out too."""
    path = write(tmp_path / "qa.jsonl", [{"prompt": f"Who is {n}?\n", "answer": str(n)} for n in range(60)])
    sides = []
    for template in ("Monday {{ messages[0].content }}", "Tuesday {{ messages[0].content }}", None):
        tokenizer = copy.deepcopy(pico_tokenizer())
        tokenizer.chat_template = template
        data = Data(path=str(path), holdout=0.3, chat_template=template is not None)
        reader = Reader(data, tokenizer, held_out=True)
        sides.append([piece.row for piece in reader.read(rows_in_order(data))])
    assert sides[0] == sides[1] == sides[2] and 5 < len(sides[0]) < 30


def test_a_limit_takes_held_out_rows_from_all_of_the_file(tmp_path: Path) -> None:
    """A file may list its rows by kind."""
    rows = [{"prompt": f"{kind} {n}?\n", "answer": str(n)} for kind in ("first", "second") for n in range(100)]
    data = Data(path=str(write(tmp_path / "qa.jsonl", rows)), holdout=0.3)
    everything, _ = read_documents(data, pico_tokenizer(), held_out=True)
    some, _ = read_documents(data, pico_tokenizer(), limit=10, held_out=True)
    assert len(some) == 10 and 3 <= sum(document.text.startswith("second") for document in some) <= 7
    assert set(some) < set(everything)


def test_every_spelling_of_a_path_is_one_file(tmp_path: Path) -> None:
    path = write(tmp_path / "qa.jsonl", [{"prompt": "Who?\n", "answer": "42"}])
    other = tmp_path / "." / "sub" / ".." / "qa.jsonl"
    (tmp_path / "sub").mkdir()
    with pytest.raises(ValidationError, match="different `holdout`"):
        Train.model_validate({"steps": 1, "sources": [source(path, holdout=0.1), source(str(other))]})


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ({"columns": {"text": "text"}}, {"columns": {"prompt": "text"}}, "different columns"),
        ({"columns": {"text": "text"}}, {"columns": {"text": "text"}, "end": False}, "different columns"),
        ({}, {"columns": {"messages": "messages"}}, "different columns"),
        ({}, {"columns": {"answer_span": "auto"}, "chat_template": True}, None),
        ({"holdout": 0.0}, {"holdout": 0.0, "columns": {"text": "text"}}, None),
    ],
)
def test_rows_are_held_out_by_the_same_columns(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], says: str | None
) -> None:
    """The content of the columns decides which rows are held out. Otherwise the second listing trains on them."""
    sources = [source(tmp_path / "qa.jsonl", **{"holdout": 0.1, **given}) for given in (first, second)]
    sources = [given | {"weights": {"base_kl": 1.0}} for given in sources]
    if says is None:
        assert Train.model_validate({"steps": 1, "sources": sources}).own_data
    else:
        with pytest.raises(ValidationError, match=rf"qa\.jsonl is listed twice with a `holdout` and {says}"):
            Train.model_validate({"steps": 1, "sources": sources})


def test_a_folder_and_a_file_in_it_share_rows(tmp_path: Path) -> None:
    sources = [source(tmp_path, holdout=0.1), source(tmp_path / "qa.jsonl")]
    with pytest.raises(ValidationError, match="different `holdout`"):
        Train.model_validate({"steps": 1, "sources": sources})
    beside = [source(tmp_path / "a.jsonl", holdout=0.1), source(tmp_path / "b.jsonl")]
    assert Train.model_validate({"steps": 1, "sources": beside}).own_data


def test_heads_are_located_on_the_same_columns_as_held_out_rows(tmp_path: Path) -> None:
    train = {"sources": [source(tmp_path / "qa.jsonl", holdout=0.1)]}
    data = {"path": str(tmp_path), "holdout": 0.1, "columns": {"prompt": "other", "answer_span": "auto"}}
    with pytest.raises(ValidationError, match=r"locate\.data\.columns: train\.sources read other columns"):
        Recipe.model_validate({"name": "x", "base": {"model": "x"}, "train": train, "locate": {"data": data}})


def test_heads_are_not_located_on_held_out_prompts(tmp_path: Path) -> None:
    path = write(tmp_path / "qa.jsonl", [{"prompt": "Who?\n", "answer": "42"}])
    given: dict[str, Any] = {"name": "x", "base": {"model": "x"}, "train": {"sources": [source(path, holdout=0.1)]}}
    for share in (0.1, 0.0):
        data = {"path": str(path), "holdout": share, "columns": {"answer_span": "auto"}}
        recipe = {**given, "locate": {"data": data}}
        if share:
            assert Recipe.model_validate(recipe).locate.data is not None
        else:
            with pytest.raises(ValidationError, match=r"locate\.data\.holdout: 0, but train\.sources hold out 0\.1"):
                Recipe.model_validate(recipe)


def test_data_sets_of_one_name_get_names_of_their_own(tmp_path: Path) -> None:
    paths = [write(tmp_path / folder / "data (1).jsonl", [{"prompt": "Who?\n", "answer": folder}]) for folder in "ab"]
    train = Train.model_validate({"steps": 1, "sources": [source(p) for p in (*paths, paths[0])]})
    assert [name for _, name in named_data(train)] == ["data (1).jsonl", "data (1).jsonl (2)"]


def test_a_name_with_brackets_is_no_pattern(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    for name, answer in (("data1", "wrong"), ("data[1]", "right")):
        write_table(pyarrow.table({"prompt": ["Who?"], "answer": [answer]}), tmp_path / f"{name}.parquet")
    data = Data(path=str(tmp_path / "data[1].parquet"))
    assert [row.fields()["answer"] for row in open_rows(data)] == ["right"]


def test_hidden_folders_and_the_mark_of_a_list(tmp_path: Path) -> None:
    shown = tmp_path / "data" / "a.json"
    write(tmp_path / "data" / ".ipynb_checkpoints" / "a-checkpoint.json", [{"prompt": "Who?", "answer": "old"}])
    shown.write_bytes(b"\xef\xbb\xbf" + json.dumps([{"prompt": "Who?", "answer": "new"}]).encode())
    data = Data(path=str(tmp_path / "data"))
    assert local_files(data) == [shown]
    assert [row.fields()["answer"] for row in rows_in_order(data)] == ["new"]
