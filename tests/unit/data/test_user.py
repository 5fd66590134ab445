"""Which documents of the user's own a step sees, which rows are held out, and how answers are found in prompts."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers.processors import TemplateProcessing

from surgery.data.documents import Reader, is_held_out
from surgery.data.encoding import encode
from surgery.data.files import rows_in_order
from surgery.data.user import count_answer_spans, named_data, open_source, read_documents
from surgery.errors import DataError, ProbeError
from surgery.evaluate.evaluation import held_out_documents
from surgery.probes.documents import Document, rng_of
from surgery.recipe import Data, Recipe, Source, Train
from tests.support.own_data import END, TOKENIZER, numbered, opened, source, stored, texts, write


def length(document: Document) -> int:
    return len(TOKENIZER(document.text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("streaming", [False, True])
def test_a_bad_row_is_named_or_counted(tmp_path: Path, streaming: bool) -> None:
    """Whether parsing, the text, or its tokens are at fault."""
    for line, said in (
        ("{", "not JSON"),
        ({"prompt": "a\n", "answer": " "}, "answer is empty"),
        ({"prompt": "red is 1", "answer": "2"}, "spans the end of the prompt"),
        ({"prompt": "a\n" * 40, "answer": "b"}, "`max_tokens` is 30"),
    ):
        path = write(tmp_path / "a.jsonl", [*numbered(3), "", line, *numbered(2)])
        with pytest.raises(DataError, match=said) as error:
            opened(path, rows=9, max_tokens=30, streaming=streaming)
        assert error.value.field == f"{path}:5"
        stream = opened(path, rows=9, max_tokens=30, streaming=streaming, on_bad_row="skip")
        assert streaming or stream.skipped == 1
        assert set(texts(stream, 0)) == {f"{r['prompt']}{r['answer']}{END}" for r in numbered(3)}


def test_every_size_of_generated_documents_is_checked_first() -> None:
    """The number of pairs is drawn in every step, so the first step may fit when a later one does not."""
    many = Source.model_validate({"task": "kv_retrieval", "pairs": [4, 64], "rows": 1})
    for seed in range(3):
        assert open_source(many, TOKENIZER, seed, 0, context=2000).step(0)
        with pytest.raises(DataError, match="The model takes at most 300"):
            open_source(many, TOKENIZER, seed, 0, context=300)
    needles = {"task": "needle_multi_query", "pairs": [2, 16], "max_tokens": 800, "rows": 1}
    with pytest.raises(ProbeError, match="800"):
        open_source(Source.model_validate({**needles, "weights": {"answer": 1.0}}), TOKENIZER, 0, 0)


def test_the_model_sets_limits_too(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*numbered(2), {"prompt": "a\n" * 40, "answer": "b"}])
    with pytest.raises(DataError, match="The model takes at most 50"):
        open_source(source(path), TOKENIZER, 0, 0, context=50)
    highest = max(i for row in numbered(2) for i in TOKENIZER(f"{row['prompt']}{row['answer']}")["input_ids"])
    with pytest.raises(DataError, match="outside the vocabulary") as error:
        open_source(source(path), TOKENIZER, 0, 0, vocab_size=highest)
    assert error.value.field in (f"{path}:1", f"{path}:2")
    assert open_source(source(path), TOKENIZER, 0, 0, context=100, vocab_size=highest + 1).skipped == 0


def test_long_texts_are_cut_and_all_of_them_is_seen(tmp_path: Path) -> None:
    rng = rng_of("long")
    long = [{"t": " ".join(rng.choice(("abc", "éß漢", "🙂\n", "12 345")) for _ in range(40))} for _ in range(5)]
    path, begins = write(tmp_path / "a.jsonl", long), copy.deepcopy(TOKENIZER)
    special = [(END, TOKENIZER.eos_token_id)]
    begins.backend_tokenizer.post_processor = TemplateProcessing(single=f"{END} $A", special_tokens=special)
    for tokenizer in (begins, TOKENIZER):  # with BOS before each piece, and without
        read, _ = read_documents(Data(path=str(path), columns={"text": "t"}), tokenizer, max_tokens=20)
        assert "".join(d.text for d in read) == "".join(row["t"] + END for row in long)
        assert max(len(tokenizer(d.text)["input_ids"]) for d in read) <= 20
    stream = opened(path, rows=3, columns={"text": "t"}, max_tokens=20)
    assert {d.text for d in read} <= {t for step in range(-(-len(read) // 3)) for t in texts(stream, step)}


KINDS = [{"rows": 3}, {"tokens": 60}]
STREAMING = [{}, {"streaming": True, "buffer": 5}]


@pytest.mark.parametrize("size", KINDS)
@pytest.mark.parametrize("how", STREAMING)
def test_a_step_alone_is_the_step_of_a_whole_run(tmp_path: Path, size: dict[str, int], how: dict[str, Any]) -> None:
    path = write(tmp_path / "a.jsonl", [*numbered(10, 3), "{"])
    make = lambda: opened(path, **size, **how, on_bad_row="skip")  # noqa: E731
    whole = make()
    steps = [texts(whole, step) for step in range(9)]
    assert texts(make(), 7) == steps[7]
    again = make()
    assert [texts(again, step) for step in (5, 2, 2, 8, 0)] == [steps[s] for s in (5, 2, 2, 8, 0)]


@pytest.mark.parametrize("size", KINDS)
@pytest.mark.parametrize("how", STREAMING)
def test_every_pass_has_every_row_once_in_an_order_of_its_own(
    tmp_path: Path, size: dict[str, int], how: dict[str, Any]
) -> None:
    path = write(tmp_path / "a.jsonl", numbered(10, 3))
    stream = opened(path, **size, **how)
    seen = [t for step in range(30) for t in texts(stream, step)]
    passes = [seen[i * 10 : (i + 1) * 10] for i in range(3)]
    expected = sorted(f"{r['prompt']}{r['answer']}{END}" for r in numbered(10, 3))
    assert [sorted(p) for p in passes] == [expected] * 3
    assert len({tuple(p) for p in passes}) == 3
    assert texts(stream, 0) != texts(opened(path, **size, **how, seed=1), 0)
    assert texts(stream, 0) != texts(opened(path, **size, **how, index=1), 0)


@pytest.mark.parametrize("how", STREAMING)
def test_a_budget_is_filled_as_far_as_documents_go(tmp_path: Path, how: dict[str, Any]) -> None:
    path = write(tmp_path / "a.jsonl", numbered(10, 3))
    for budget in (1, 25, 60, 500):
        stream = opened(path, tokens=budget, **how)
        for documents, following in pairwise(stream.step(step) for step in range(6)):
            used = sum(map(length, documents))
            assert len(documents) == 1 or used <= budget
            assert used + length(following[0]) > budget


# answers that are found in the prompt


FOX = {"prompt": "fox:12\nowl: 345\nWhere is the owl?\n", "answer": " 345"}
TWICE = {"prompt": "fox:7\nowl:7\nWhere is the owl?\n", "answer": "7"}
ABSENT = {"prompt": "fox:123\nWhere is the owl?\n", "answer": "12"}


def searched(path: Path | str, **data: Any) -> Source:
    return source(path, rows=3, columns={"answer_span": "auto"}, **data)


@pytest.mark.parametrize("streaming", [False, True])
def test_an_answer_that_occurs_once_is_its_span(tmp_path: Path, streaming: bool) -> None:
    """Rows with a span of their own are read as with the named column, even where the answer occurs twice."""
    for name in ("a.jsonl", "a.parquet"):
        path = stored(tmp_path / name, [FOX, TWICE, ABSENT])
        stream = open_source(searched(path, streaming=streaming), TOKENIZER, 0, 0)
        by_text = {d.text: d.questions[0] for d in stream.step(0)}
        fox, *others = (by_text[f"{row['prompt']}{row['answer']}{END}"] for row in (FOX, TWICE, ABSENT))
        assert fox.value == (12, 15) and fox.segment == (7, 16)
        assert all(question.value is None and question.segment is None for question in others)
        batch = encode(stream.step(0), TOKENIZER)
        assert int((batch.answer_token >= 0).sum()) == int((batch.segment_end >= 0).sum()) == 1
        rows = [{**FOX, "answer_span": [12, 15]}, {**TWICE, "answer_span": [10, 11]}]
        path = stored(tmp_path / f"marked_{name}", rows)
        named, auto = (opened(path, columns={"answer_span": c}, streaming=streaming) for c in ("answer_span", "auto"))
        assert [named.step(i) for i in range(4)] == [auto.step(i) for i in range(4)]


def counted(*sources: Source) -> dict[str, dict[str, int]]:
    return count_answer_spans(Train(sources=sources), TOKENIZER)


@pytest.mark.parametrize("streaming", [False, True])
def test_training_rows_are_counted_by_place(tmp_path: Path, streaming: bool) -> None:
    rows = [
        {**row, "prompt": f"{i}x\n{row['prompt']}"}
        for row, count in ((FOX, 70), (TWICE, 50), (ABSENT, 40))
        for i in range(count)
    ]
    path = write(tmp_path / "a.jsonl", rows)
    more = {"first_rows": 160} if streaming else {}
    everything = {"found": 70, "ambiguous": 50, "missing": 40, **more}
    assert counted(searched(path, streaming=streaming)) == {"a.jsonl": everything}
    held = searched(path, streaming=streaming, holdout=0.3)
    assert held.data is not None
    reader = Reader(held.data, TOKENIZER, held_out=True)
    kept = sum(1 for _ in reader.read(rows_in_order(reader.data)))
    assert kept and reader.spans.total() == kept
    sides = {key: counted(held)["a.jsonl"][key] + reader.spans[key] for key in ("found", "ambiguous", "missing")}
    assert {**sides, **more} == everything


# rows that are held out


PROMPTS = [f"Who has ticket {i}?\n" for i in range(200)]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write(tmp_path / "rows.jsonl", [{"prompt": p, "answer": str(i)} for i, p in enumerate(PROMPTS)])


def prompt(document: Document) -> str:
    return document.text[: document.questions[0].answer[0]] if document.questions else document.text


def trained_on(made: Source, steps: int, seed: int = 0) -> set[str]:
    stream = open_source(made, TOKENIZER, seed, 0)
    return {prompt(d) for step in range(steps) for d in stream.step(step)}


def held_out(made: Source) -> list[str]:
    assert made.data is not None
    return [prompt(d) for d in read_documents(made.data, TOKENIZER, made.max_tokens, held_out=True)[0]]


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_held_out_is_never_trained_on(rows: Path, streaming: bool) -> None:
    """Over several passes; together the sides are all there is. A greater share keeps what a smaller one held out."""
    for seed in (0, 1):
        made = source(rows, 10, holdout=0.25, streaming=streaming, buffer=16)
        asked, trained = set(held_out(made)), trained_on(made, 45, seed)
        assert not asked & trained and asked | trained == set(PROMPTS)
        assert 30 <= len(asked) <= 70, "a quarter of 200, give or take"
    assert set(held_out(source(rows, holdout=0.1))) < asked
    assert trained_on(source(rows, 10), 20) == set(PROMPTS), "nothing is held out unless it is asked for"
    for share, side, read in (
        (0.999999, "left for training", lambda made: trained_on(made, 1)),
        (1e-6, "held out", held_out),
    ):
        with pytest.raises(DataError, match=rf"rows\.jsonl: no row is {side}.*another share"):
            read(source(rows, holdout=share, streaming=streaming))


def test_equal_prompts_are_on_one_side_whatever_their_answers(tmp_path: Path) -> None:
    """And whatever a chat template writes: it may print the date."""
    twice = [{"prompt": p, "answer": answer} for answer in ("yes", "no") for p in PROMPTS[:60]]
    path, sides = write(tmp_path / "twice.jsonl", twice), []
    for template in ("Monday {{ messages[0].content }}", "Tuesday {{ messages[0].content }}", None):
        tokenizer = copy.deepcopy(TOKENIZER)
        tokenizer.chat_template = template
        data = Data(path=str(path), holdout=0.3, chat_template=template is not None)
        reader = Reader(data, tokenizer, held_out=True)
        sides.append([piece.row for piece in reader.read(rows_in_order(data))])
    assert sides[0] == sides[1] == sides[2] and 10 < len(sides[0]) < 60
    asked = held_out(source(path, holdout=0.3))
    assert len(asked) == 2 * len(set(asked)) and not set(asked) & trained_on(source(path, 10, holdout=0.3), 12)


def test_whole_texts_are_held_out_not_their_pieces(tmp_path: Path) -> None:
    long = [{"text": f"The old baker went to the market {i} times. " * 4} for i in range(60)]
    made = source(
        write(tmp_path / "t.jsonl", long), 10, holdout=0.3, columns={"text": "text"}, end=False, max_tokens=20
    )
    sides = held_out(made), trained_on(made, 60)
    of = [{i for i in range(60) if any(f"market {i} times" in piece for piece in side)} for side in sides]
    assert not of[0] & of[1] and of[0] | of[1] == set(range(60)) and of[0]


def test_a_limit_takes_held_out_rows_from_all_of_the_file(tmp_path: Path) -> None:
    """A file may list its rows by kind."""
    kinds = [{"prompt": f"{kind} {n}?\n", "answer": str(n)} for kind in ("first", "second") for n in range(100)]
    data = Data(path=str(write(tmp_path / "qa.jsonl", kinds)), holdout=0.3)
    everything, _ = read_documents(data, TOKENIZER, held_out=True)
    some, _ = read_documents(data, TOKENIZER, limit=10, held_out=True)
    assert len(some) == 10 and 3 <= sum(document.text.startswith("second") for document in some) <= 7
    assert set(some) < set(everything)


def test_evaluation_asks_them_by_name(tmp_path: Path, rows: Path) -> None:
    """Each data set once, however often it is listed; two files of one name are told apart."""
    other = write(tmp_path / "more" / "rows.jsonl", [{"prompt": p + "And?\n", "answer": "x"} for p in PROMPTS])
    train = Train(sources=tuple(source(path, holdout=0.2) for path in (rows, other, rows)))
    assert [name for _, name in named_data(train)] == ["rows.jsonl", "rows.jsonl (2)"]
    found = held_out_documents(train, TOKENIZER, limit=5)
    assert {name: len(documents) for name, documents in found.items()} == {"rows.jsonl": 5, "rows.jsonl (2)": 5}
    assert {prompt(d) for d in found["rows.jsonl"]} <= {p for p in PROMPTS if is_held_out(p, 0.2)}
    assert held_out_documents(Train(sources=(source(rows),)), TOKENIZER, limit=5) == {}


def test_a_file_is_held_out_in_one_way(tmp_path: Path) -> None:
    """The content of the columns decides which rows are held out. Otherwise the second listing trains on them."""

    def listed(first: dict[str, Any], second: dict[str, Any]) -> Train:
        paths = [given.pop("path", tmp_path / "qa.jsonl") for given in (first, second)]
        sources = [source(path, **given).model_dump() for path, given in zip(paths, (first, second), strict=True)]
        return Train.model_validate({"steps": 1, "sources": sources})

    (tmp_path / "sub").mkdir()
    share, text = {"holdout": 0.1}, {"columns": {"text": "text"}}
    refused: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({**share}, {"path": tmp_path / "sub" / ".." / "qa.jsonl"}, "different `holdout`"),
        ({**share, "path": tmp_path}, {}, "different `holdout`"),
        ({**share, **text}, {**share, "columns": {"prompt": "text"}}, "different columns"),
        ({**share, **text}, {**share, **text, "end": False}, "different columns"),
        ({**share}, {**share, "columns": {"messages": "messages"}}, "different columns"),
    ]
    for first, second, said in refused:
        with pytest.raises(ValidationError, match=said):
            listed(first, second)
    assert listed({**share}, {**share, "columns": {"answer_span": "auto"}, "chat_template": True}).own_data
    assert listed({}, {**text}).own_data
    assert listed({**share, "path": tmp_path / "a.jsonl"}, {"path": tmp_path / "b.jsonl"}).own_data


def test_heads_are_not_located_on_held_out_prompts(rows: Path) -> None:
    sources = [source(rows, holdout=0.1).model_dump()]
    given = {"name": "x", "base": {"model": "x"}, "train": {"sources": sources}}
    for data, said in (
        ({"path": str(rows), "holdout": 0.1}, None),
        ({"path": str(rows)}, r"locate\.data\.holdout: 0, but train\.sources hold out 0\.1"),
        (
            {"path": str(rows.parent), "holdout": 0.1, "columns": {"prompt": "other"}},
            r"locate\.data\.columns: train\.s",
        ),
    ):
        columns = {"answer_span": "auto", **data.get("columns", {})}
        recipe = {**given, "locate": {"data": {**data, "columns": columns}}}
        if said is None:
            assert Recipe.model_validate(recipe).locate.data is not None
        else:
            with pytest.raises(ValidationError, match=said):
                Recipe.model_validate(recipe)
