"""Files, folders and the Hub: every format has the same rows, and what cannot be read is one clear error."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow.parquet import write_table

from surgery.data.files import local_files, open_rows, rows_in_order
from surgery.data.user import read_documents
from surgery.errors import DataError
from surgery.recipe import Data
from tests.support.own_data import END, TOKENIZER, fake_hub, numbered, opened, stored, texts, write


def test_every_format_holds_the_same_rows(tmp_path: Path) -> None:
    rows = numbered(7)
    lines = write(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1))
    write(tmp_path / "c.json", rows)
    stored(tmp_path / "d.parquet", rows)
    write(tmp_path / "e" / "1.jsonl", rows[:3])
    write(tmp_path / "e" / "2.jsonl", [])
    write(tmp_path / "e" / "more" / "3.jsonl", rows[3:])
    (tmp_path / "f").mkdir()
    write_table(pyarrow.Table.from_pylist(rows).slice(0, 0), tmp_path / "f" / "1.parquet")
    stored(tmp_path / "f" / "2.parquet", rows)
    expected = [texts(opened(lines), step) for step in range(3)]
    for name in ("b.json", "c.json", "d.parquet", "e", "f"):
        data = Data(path=str(tmp_path / name))
        assert [dict(row.fields()) for row in rows_in_order(data)] == rows
        found = open_rows(data)
        assert [dict(found[i].fields()) for i in range(len(found))] == rows
        assert [found[i].where for i in range(len(found))] == [row.where for row in found]
        assert [row.where for row in found] == [row.where for row in rows_in_order(data)]
        assert [texts(opened(tmp_path / name), step) for step in range(3)] == expected


def test_rows_say_where_they_stand(tmp_path: Path) -> None:
    bad = {"prompt": "a", "answer": ""}
    write(tmp_path / "in" / "1.jsonl", numbered(3))
    write(tmp_path / "in" / "2.jsonl", ["", *numbered(1), bad])
    stored(tmp_path / "a.parquet", [*numbered(2), bad])
    stored(tmp_path / "a.json", [bad])
    for name, where in (("in", "in/2.jsonl:3"), ("a.parquet", "a.parquet: row 3"), ("a.json", "a.json: row 1")):
        for streaming in (False, True):
            with pytest.raises(DataError, match="answer is empty") as error:
                opened(tmp_path / name, rows=9, streaming=streaming)
            assert error.value.field == f"{tmp_path}/{where}"


def test_a_split_of_a_folder_is_found_by_name(tmp_path: Path) -> None:
    write(tmp_path / "f" / "train-0.jsonl", numbered(3))
    write(tmp_path / "f" / "train-1.jsonl", numbered(2))
    write(tmp_path / "f" / "test" / "0.jsonl", numbered(1))
    counts = {split: len(open_rows(Data(path=str(tmp_path / "f"), split=split))) for split in ("train", "test")}
    assert counts == {"train": 5, "test": 1}
    with pytest.raises(DataError, match="has the splits test, train"):
        open_rows(Data(path=str(tmp_path / "f"), split="validation"))
    write(tmp_path / "f" / "other.jsonl", numbered(1))
    with pytest.raises(DataError, match=r"other\.jsonl does not"):
        open_rows(Data(path=str(tmp_path / "f")))


def test_names_are_taken_as_they_are(tmp_path: Path) -> None:
    """Brackets are no pattern; hidden entries of a folder are left out, and read if they are named."""
    for name, answer in (("data1", "wrong"), ("data[1]", "right")):
        stored(tmp_path / f"{name}.parquet", [{"prompt": "Who?", "answer": answer}])
    rows = open_rows(Data(path=str(tmp_path / "data[1].parquet")))
    assert [row.fields()["answer"] for row in rows] == ["right"]
    hidden = write(tmp_path / "data" / ".ipynb_checkpoints" / "a-checkpoint.json", [{"prompt": "?", "answer": "old"}])
    shown = tmp_path / "data" / "a.json"
    shown.write_bytes(b"\xef\xbb\xbf" + json.dumps([{"prompt": "Who?", "answer": "new"}]).encode())  # with a BOM
    data = Data(path=str(tmp_path / "data"))
    assert local_files(data) == [shown] and [row.fields()["answer"] for row in rows_in_order(data)] == ["new"]
    assert [row.fields()["answer"] for row in rows_in_order(Data(path=str(hidden)))] == ["old"]


def bad_paths(root: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Data that is not there, or cannot be read, and what is said."""
    for path in (f"{root}/none", "data/none.jsonl", "parquet"):
        yield {"path": path}, "No such file"
    (root / "empty").mkdir()
    yield {"path": f"{root}/empty"}, "It has no .jsonl"
    (root / "a.csv").write_text("a,b\n")
    yield {"path": f"{root}/a.csv"}, "A .csv is not read"
    (root / "wide.jsonl").write_bytes('{"prompt": "a", "answer": "b"}\n'.encode("utf-16"))
    yield {"path": f"{root}/wide.jsonl"}, "UTF-16, not UTF-8. Save the file in UTF-8."
    yield {"path": str(write(root / "blank.jsonl", [""])), "holdout": 0.1}, "no rows. Add at least one."
    (root / "whole.json").write_text(json.dumps({"data": numbered(2)}, indent=1))
    yield {"path": f"{root}/whole.json"}, "Write one JSON object per line"
    (root / "none.json").write_text("[]")
    yield {"path": f"{root}/none.json"}, "none.json: no rows"
    write_table(pyarrow.Table.from_pylist(numbered(1)).slice(0, 0), root / "none.parquet")
    yield {"path": f"{root}/none.parquet"}, "none.parquet: no rows"
    two = write(root / "two.jsonl", ["{", "{"])
    yield {"path": str(two)}, ": not JSON"
    yield {"path": str(two), "on_bad_row": "skip"}, "none of its 2 rows can be used"
    yield {"path": str(write(root / "list.jsonl", ["[1]"]))}, "list.jsonl:1: a JSON list, not an object"
    other = write(root / "other.jsonl", [{"question": "a", "reply": "b"}])
    yield {"path": str(other)}, "train.sources.0.data.columns.prompt=question or locate.data.columns.prompt=question."
    chats = write(root / "chats.jsonl", [{"messages": []}])
    yield {"path": str(chats)}, "such as train.sources.0.data.columns.messages=messages or"
    short = write(root / "short.jsonl", [{"prompt": "a", "answer_span": [0, 1]}])
    yield {"path": str(short)}, "such as train.sources.0.data.columns.answer=NAME or"
    (root / "hole.jsonl").write_bytes(json.dumps(numbered(1)[0]).encode() + b"\n\0\0\n")
    yield {"path": f"{root}/hole.jsonl"}, f"{root}/hole.jsonl:2: NUL bytes"
    for name, begins, said in (
        ("lines.jsonl", json.dumps(numbered(1)[0]) + "\n", ":2: a line of more than"),
        ("long.json", "[", "a JSON list of more than 1024 MiB"),
    ):
        (root / name).write_text(begins)
        os.truncate(root / name, 2**40)  # without blocks on the disk
        yield {"path": f"{root}/{name}"}, said
    (root / "pipes").mkdir()
    os.mkfifo(root / "pipes" / "a.jsonl")
    for path in (root / "pipes", root / "pipes" / "a.jsonl"):
        yield {"path": str(path)}, "a.jsonl. It is no regular file"
    write(root / "links" / "good.jsonl", numbered(2))
    (root / "links" / "gone.jsonl").symlink_to("moved.jsonl")
    yield {"path": f"{root}/links"}, "links/gone.jsonl. It is a link to moved.jsonl, which does not exist. Restore"
    write(root / "mixed" / "a.jsonl", numbered(1))
    write(root / "mixed" / "b.json", numbered(1))
    yield {"path": f"{root}/mixed"}, ".json and .jsonl"
    write(root / "a.jsonl", numbered(1))
    yield {"path": f"{root}/a.jsonl", "split": "test"}, "Remove `split`"
    yield {"path": f"{root}/a.jsonl", "revision": "main"}, "apply to Hub data sets"
    (root / "a.json").write_text('[{"prompt": "a"\n"answer": "b"}]')
    yield {"path": f"{root}/a.json"}, f"{root}/a.json:2: not JSON"
    yield {"path": str(write(root / "a.parquet", numbered(1)))}, "not a Parquet file"
    stored(root / "b.parquet", [{"prompt": "a", "reply": "b"}])
    yield {"path": f"{root}/b.parquet"}, "no column 'answer'. The columns are prompt, reply"
    write_table(pyarrow.Table.from_pylist(numbered(200)), root / "damaged.parquet", compression="none")
    damaged = bytearray((root / "damaged.parquet").read_bytes())
    damaged[4:40] = bytes(36)
    (root / "damaged.parquet").write_bytes(damaged)
    yield {"path": f"{root}/damaged.parquet"}, "its rows cannot be read"


@pytest.mark.parametrize("streaming", [False, True])
def test_what_cannot_be_read_is_one_clear_error(tmp_path: Path, streaming: bool) -> None:
    for data, said in bad_paths(tmp_path):
        with pytest.raises(DataError) as error:
            opened(data.pop("path"), streaming=streaming, **data)
        assert said in str(error.value)


def test_a_key_twice_in_a_row_is_noted_once_for_each_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    twice = json.dumps(numbered(1)[0])[:-1] + ', "n": 1, "n": 2}'
    path = write(tmp_path / "a.jsonl", [*numbered(1), twice, twice])
    assert len(opened(path, rows=9).step(1)) == 9
    listed = tmp_path / "a.json"
    listed.write_text(f"[{twice}, {twice}]")
    opened(listed)
    repeated = "the key 'n' is there twice, and the last value counts. Keep one."
    assert [r.getMessage() for r in caplog.records] == [f"{path}:2: {repeated}", f"{listed}: {repeated}"]


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", numbered(4))
    stream = opened(path)
    write(path, numbered(5))
    with pytest.raises(DataError, match="changed while it was in use"):
        stream.step(0)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_that_fails_is_one_clear_error_without_the_token(
    monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    with pytest.raises(DataError, match="owner/absent: loading from the Hub failed") as error:
        opened("owner/absent", streaming=streaming)
    assert error.value.__suppress_context__
    fake_hub(monkeypatch, OSError("401 for https://user:hf_aBcD1234@host"))
    with pytest.raises(DataError, match=r"401 for https://user:hf_\.\.\.@host"):
        opened("owner/gated", streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_set_is_read_by_its_columns(monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    rows = [{**row, "more": i} for i, row in enumerate(numbered(6))]
    asked = fake_hub(monkeypatch, datasets.Dataset.from_list(rows))
    columns = {"answer_span": "auto"}  # a column that may be absent
    of_hub: dict[str, Any] = {"name": "small", "split": "dev", "revision": "v1", "columns": columns}
    stream = opened("owner/name", rows=6, streaming=streaming, **of_hub)
    assert asked == [("owner/name", "small", "dev", "v1", streaming)]
    assert {d.task for d in stream.step(0)} == {"owner/name"}
    assert sorted(texts(stream, 0)) == sorted(f"{r['prompt']}{r['answer']}{END}" for r in rows)
    with pytest.raises(DataError, match=r"no column 'q'\. The columns are prompt, answer, more"):
        opened("owner/name", streaming=streaming, columns={"prompt": "q"})
    read, _ = read_documents(Data(path="owner/name", streaming=streaming), TOKENIZER, limit=2)
    assert [d.text for d in read] == [f"{r['prompt']}{r['answer']}{END}" for r in rows[:2]]
