"""Rows of the user's own: what they become, what is refused and where, and which of them step i sees."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow.parquet import write_table
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordPiece
from tokenizers.pre_tokenizers import ByteLevel, Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import AddedToken, PreTrainedTokenizerFast

from surgery.data.documents import Reader, check_documents
from surgery.data.encoding import encode
from surgery.data.files import Row, open_rows, rows_in_order
from surgery.data.generated import Stream
from surgery.data.pieces import cut
from surgery.data.user import count_answer_spans, open_source, read_documents
from surgery.errors import DataError, ProbeError
from surgery.probes.documents import Document, Question, rng_of
from surgery.recipe import Data, Source, Train
from tests.support.pico import pico_tokenizer

TOKENIZER = pico_tokenizer()
END = TOKENIZER.eos_token
CHAT = (
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content | trim }}\n{% endfor %}"
    "{% if messages[0].role == 'tool' %}{{ raise_exception('tool comes first') }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
GOOD = {"prompt": "red:4\nblue:7\nblue is", "answer": "7", "at": [11, 12], "n": 1}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER.backend_tokenizer, eos_token=END)
    tokenizer.chat_template = CHAT
    return tokenizer


def write(path: Path, rows: list[Any]) -> Path:
    """Rows as JSON lines; text is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
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


def length(document: Document) -> int:
    return len(TOKENIZER(document.text, add_special_tokens=False)["input_ids"])


# what a row becomes


def test_prompt_and_answer_are_one_text_and_the_answer_ends_it(tmp_path: Path) -> None:
    (document,), skipped = read_documents(Data(path=str(write(tmp_path / "a.jsonl", [GOOD]))), TOKENIZER)
    assert document == Document("a.jsonl", f"{GOOD['prompt']}7{END}", (Question((20, 21 + len(END)), (), -1),))
    assert skipped == 0


def test_spans_stand_on_their_tokens(tmp_path: Path) -> None:
    data = Data.model_validate({"path": str(write(tmp_path / "a.jsonl", [GOOD])), "columns": {"answer_span": "at"}})
    batch = encode(read_documents(data, TOKENIZER)[0], TOKENIZER)
    shown = TOKENIZER.convert_ids_to_tokens(batch.input_ids[0].tolist())
    at = {name: int(getattr(batch, name)[0, 0]) for name in ("query", "answer_token", "segment_start", "segment_end")}
    assert [shown[at["query"]], shown[at["answer_token"]]] == [TOKENIZER.tokenize("blue is")[-1], "7"]
    assert TOKENIZER.decode(batch.input_ids[0, at["segment_start"] : at["segment_end"] + 1]) == "blue:7\n"
    assert TOKENIZER.decode(batch.input_ids[0, batch.answers[0]]) == f"7{END}"
    assert batch.gold.tolist() == [[-1]]


@pytest.mark.parametrize(
    ("prompt", "span", "line"),
    [
        ("a:1\nb:2\nis", [2, 3], "a:1\n"),
        ("a:1\nb:2\nis", [6, 7], "b:2\n"),
        ("a:1\nb:2\nis", [2, 7], "a:1\nb:2\n"),
        ("a:1\nb:2\nis", [2, 4], "a:1\n"),
        ("a:1\nb is 2. b is:", [9, 10], "b is 2"),
        ("only 7 here", [5, 6], "only 7"),
        ("only 7 here\n \n", [5, 6], "only 7"),
    ],
)
def test_a_segment_is_the_line_of_the_span_and_ends_before_the_query(prompt: str, span: list[int], line: str) -> None:
    data = Data.model_validate({"path": "none", "columns": {"answer_span": "at"}})
    row = Row("here", {"prompt": prompt, "answer": f" {prompt[slice(*span)]}", "at": span})
    question = Reader(data, TOKENIZER).document(row).questions[0]
    assert question.segment is not None
    assert prompt[slice(*question.segment)] == line
    assert question.value == tuple(span)


def test_without_an_end_the_text_stops_at_the_answer() -> None:
    document = Reader(Data(path="none", end=False), TOKENIZER).document(Row("here", GOOD))
    assert document.text == f"{GOOD['prompt']}7"
    assert document.questions[0].answer == (20, 21)


def test_an_end_token_that_the_answer_has_is_not_doubled() -> None:
    """So `answer_span: auto` finds the answer, and its exact match can be right."""
    data = Data.model_validate({"path": "none", "columns": {"answer_span": "auto"}})
    plain, ended = (
        Reader(data, TOKENIZER).document(Row("here", {"prompt": "a 42 b\n", "answer": answer}))
        for answer in ("42", f"42{END}")
    )
    assert plain == ended and plain.text.count(END) == 1 and ended.questions[0].value == (2, 4)


def test_a_chat_is_the_template_and_the_last_message(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "  red:4\nblue is", "name": None},
        {"role": "assistant", "content": "4"},
    ]
    data = Data.model_validate({"path": "none", "columns": {"messages": "m", "answer_span": "at"}})
    document = Reader(data, chat_tokenizer).document(Row("here", {"m": messages, "at": [6, 7]}))
    prompt = "<user>\nhi\n<assistant>\nyes\n<user>\nred:4\nblue is\n<assistant>\n"
    question = document.questions[0]
    assert document.text == f"{prompt}4{END}"
    assert [document.text[slice(*span)] for span in (question.answer, question.value, question.segment) if span] == [
        f"4{END}", "4", "red:4\n"
    ]  # fmt: skip


def test_prompt_and_answer_through_a_chat_template_are_two_messages(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    as_chat = Data.model_validate({"path": "none", "chat_template": True, "columns": {"answer_span": "at"}})
    said = Data.model_validate({"path": "none", "columns": {"messages": "m", "answer_span": "at"}})
    pair = [{"role": "user", "content": GOOD["prompt"]}, {"role": "assistant", "content": "7"}]
    first = Reader(as_chat, chat_tokenizer).document(Row("here", GOOD))
    assert first == Reader(said, chat_tokenizer).document(Row("here", {"m": pair, "at": [11, 12]}))
    assert encode([first], chat_tokenizer).answer_token[0, 0] >= 0


# cutting


def random_text(seed: int, words: int) -> str:
    rng = rng_of("cut", seed)
    letters = "abcdefg éß漢🙂\n 0123456789"
    return " ".join("".join(rng.choice(letters) for _ in range(rng.randint(1, 12))) for _ in range(words))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("limit", [5, 17, 1000])
def test_pieces_are_the_text_and_have_its_tokens(seed: int, limit: int) -> None:
    text = random_text(seed, 30)
    encoded = TOKENIZER(text, add_special_tokens=False, return_offsets_mapping=True)
    whole, offsets = encoded["input_ids"], encoded["offset_mapping"]
    pieces = cut(text, whole, offsets, limit, lambda t: TOKENIZER(t, add_special_tokens=False)["input_ids"])
    parts = [text[slice(*span)] for span, _ in pieces]
    ids = [TOKENIZER(part, add_special_tokens=False)["input_ids"] for part in parts]
    assert "".join(parts) == text
    assert [i for part in ids for i in part] == whole
    assert [n for _, n in pieces] == [len(part) for part in ids]
    assert max(map(len, ids)) <= limit


def test_a_tokenizer_that_puts_a_space_first_still_fits_the_limit() -> None:
    spaced = lambda text: TOKENIZER(f" {text}", add_special_tokens=False)["input_ids"]  # noqa: E731
    text = random_text(3, 40)
    encoded = TOKENIZER(text, add_special_tokens=False, return_offsets_mapping=True)
    pieces = cut(text, encoded["input_ids"], encoded["offset_mapping"], 12, spaced)
    assert "".join(text[slice(*span)] for span, _ in pieces) == text
    assert all(n == len(spaced(text[slice(*span)])) <= 12 for span, n in pieces)


def test_a_word_is_not_cut_where_its_end_would_become_another_token() -> None:
    vocabulary = {"[UNK]": 0, "un": 1, "##able": 2, "able": 3}
    backend = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    pieces_of = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    text = "unable able unable unable"
    encoded = pieces_of(text, return_offsets_mapping=True)
    pieces = cut(text, encoded["input_ids"], encoded["offset_mapping"], 4, lambda t: pieces_of(t)["input_ids"])
    assert [text[slice(*span)] for span, _ in pieces] == ["unable able ", "unable unable"]


def test_a_piece_does_not_end_where_its_last_token_would_be_another() -> None:
    def tokens(part: str) -> list[int]:  # one a character, and a space at the end is a token of its own kind
        return [0 if part[i:] == " " else ord(c) for i, c in enumerate(part)]

    text = "ab cd ef"
    pieces = cut(text, tokens(text), [(i, i + 1) for i in range(len(text))], 3, tokens)
    assert [text[slice(*span)] for span, _ in pieces] == ["ab", " cd", " ef"]


def test_no_cut_within_a_character_is_tried() -> None:
    text, tried = "漢🙂" * 30, Counter[str]()
    encoded = TOKENIZER(text, add_special_tokens=False, return_offsets_mapping=True)

    def tokens(part: str) -> list[int]:
        tried[part] += 1
        return TOKENIZER(part, add_special_tokens=False)["input_ids"]

    pieces = cut(text, encoded["input_ids"], encoded["offset_mapping"], 20, tokens)
    assert {text[slice(*span)] for span, _ in pieces} <= tried.keys()
    assert tried.total() == 2 * len(pieces), "one look at each piece, and one behind it"


def test_a_limit_below_one_character_is_refused() -> None:
    encoded = TOKENIZER("漢字", add_special_tokens=False, return_offsets_mapping=True)
    with pytest.raises(DataError, match="max_tokens: 1"):
        cut("漢字", encoded["input_ids"], encoded["offset_mapping"], 1, lambda t: TOKENIZER(t)["input_ids"])


def test_long_texts_are_cut_and_all_of_them_is_seen(tmp_path: Path) -> None:
    long = [{"t": random_text(i, 20 + i)} for i in range(5)]
    path = write(tmp_path / "a.jsonl", long)
    stream = opened(path, rows=3, columns={"text": "t"}, max_tokens=20)
    read, _ = read_documents(source(path, columns={"text": "t"}).data or Data(path=""), TOKENIZER, max_tokens=20)
    assert "".join(d.text for d in read) == "".join(row["t"] + END for row in long)
    assert max(map(length, read)) <= 20
    steps = -(-len(read) // 3)
    assert {d.text for d in read} <= {t for step in range(steps) for t in texts(stream, step)}
    begins = copy.deepcopy(TOKENIZER)
    special = [(END, TOKENIZER.eos_token_id)]
    begins.backend_tokenizer.post_processor = TemplateProcessing(single=f"{END} $A", special_tokens=special)
    read, _ = read_documents(Data.model_validate({"path": str(path), "columns": {"text": "t"}}), begins, max_tokens=20)
    assert "".join(d.text for d in read) == "".join(row["t"] + END for row in long)
    assert max(len(begins(d.text)["input_ids"]) for d in read) <= 20, "with BOS before each piece"


# what is refused


BAD_LINES = [
    ("{", "not JSON"),
    ("[1]", "a JSON list, not an object"),
    ({"prompt": "a"}, "`answer` is missing"),
    ({"prompt": "a", "answer": None}, "`answer` is null"),
    ({"prompt": "a", "answer": 7}, "It has type int"),
    ({"prompt": ["a"], "answer": "7"}, "It has type list"),
    ({"prompt": "a\n", "answer": " "}, "answer is empty"),
    ({"prompt": "", "answer": "b"}, "prompt is empty"),
    ({"prompt": "a\ud800\n", "answer": "b"}, "not Unicode"),
    ({"prompt": "red is 1", "answer": "2"}, "spans the end of the prompt"),
    ({"prompt": "a\n" * 40, "answer": "b"}, "`max_tokens` is 30"),
]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("line", "said"), BAD_LINES)
def test_a_bad_line_is_named_or_counted(tmp_path: Path, line: Any, said: str, streaming: bool) -> None:
    path = write(tmp_path / "a.jsonl", [*numbered(3), "", line, *numbered(2)])
    with pytest.raises(DataError, match=said) as error:
        opened(path, rows=9, max_tokens=30, streaming=streaming)
    assert error.value.field == f"{path}:5"
    stream = opened(path, rows=9, max_tokens=30, streaming=streaming, on_bad_row="skip")
    assert stream.skipped == 1
    assert set(texts(stream, 0)) == {f"{r['prompt']}{r['answer']}{END}" for r in numbered(3)}


@pytest.mark.parametrize(
    ("span", "said"),
    [
        ([11, 11], "not empty"),
        ([12, 11], "not empty"),
        ([-1, 3], "not empty"),
        ([11, 21], "inside the prompt of 20 characters"),
        ([1.0, 2], "two integers"),
        ([True, 2], "two integers"),
        ("11:12", "two integers"),
        (None, "two integers, or set `data.columns.answer_span: auto`"),
    ],
)
def test_a_span_outside_the_prompt_is_refused(tmp_path: Path, span: Any, said: str) -> None:
    path = write(tmp_path / "a.jsonl", [{**GOOD, "at": span}])
    with pytest.raises(DataError, match=said) as error:
        opened(path, columns={"answer_span": "at"})
    assert error.value.field == f"{path}:1"


AGENTS = "fox:1234\nowl: 5678\nThe owl's is"
OWL = AGENTS.index("5678")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("form", ["jsonl", "parquet", "chat"])
@pytest.mark.parametrize("off", [(-2, -2), (1, 1), (0, -1), (0, 2), (-4, -1), (-OWL + 4, -OWL + 4)])
def test_a_span_that_does_not_hold_the_answer_is_refused_or_counted(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, form: str, streaming: bool, off: tuple[int, int]
) -> None:
    good = {"prompt": AGENTS, "answer": " 5678", "at": [OWL, OWL + 4]}
    bad = {**good, "at": [OWL + off[0], OWL + 4 + off[1]]}
    rows, path = [good, bad, good], tmp_path / ("a.parquet" if form == "parquet" else "a.jsonl")
    if form == "parquet":
        write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        write(path, rows)
    given = {"columns": {"answer_span": "at"}, "streaming": streaming, "chat_template": form == "chat"}
    with pytest.raises(DataError) as error:
        open_source(source(path, rows=3, **given), chat_tokenizer, 0, 0)
    assert error.value.field == (f"{path}: row 2" if form == "parquet" else f"{path}:2")
    span = "[{}, {})".format(*bad["at"])
    assert error.value.value == f"the span {span} is {AGENTS[slice(*bad['at'])]!r}, but the answer is ' 5678'"
    assert f"The prompt has the answer at [{OWL}, {OWL + 4})" in error.value.hint
    stream = open_source(source(path, rows=2, on_bad_row="skip", **given), chat_tokenizer, 0, 0)
    assert stream.skipped == 1
    for document in stream.step(0):
        (question,) = document.questions
        assert question.value is not None and document.text[slice(*question.value)] == "5678"


@pytest.mark.parametrize(("before", "after"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_whitespace_around_a_span_is_not_what_a_head_looks_at(before: int, after: int) -> None:
    data = Data.model_validate({"path": "none", "columns": {"answer_span": "at"}})
    row = {"prompt": AGENTS, "answer": "5678", "at": [OWL - before, OWL + 4 + after]}
    (question,) = Reader(data, TOKENIZER).document(Row("here", row)).questions
    assert question.value is not None and question.value[0] == OWL


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("hi", "list of"),
        ([{"role": "assistant", "content": "hi"}], "list of"),
        (
            [{"role": "user", "content": "hi"}, {"role": "user", "content": "hi"}],
            "the last message has the role 'user'",
        ),
        ([{"role": "user", "content": ["hi"]}, {"role": "assistant", "content": "hi"}], "message {'role'"),
        ([{"role": "tool", "content": "hi"}, {"role": "assistant", "content": "hi"}], "tool comes first"),
    ],
)
def test_a_chat_that_is_none_is_refused(chat_tokenizer: PreTrainedTokenizerFast, messages: Any, said: str) -> None:
    reader = Reader(Data.model_validate({"path": "none", "columns": {"messages": "m"}}), chat_tokenizer)
    with pytest.raises(DataError, match=said) as error:
        reader.document(Row("a.jsonl:3", {"m": messages}))
    assert error.value.field == "a.jsonl:3"


def test_a_template_that_changes_the_prompt_loses_the_span(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    other = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER.backend_tokenizer, eos_token=END)
    other.chat_template = CHAT.replace("trim", "upper")
    data = Data.model_validate({"path": "none", "chat_template": True, "columns": {"answer_span": "at"}})
    with pytest.raises(DataError, match="template changes the prompt"):
        Reader(data, other).document(Row("here", GOOD))
    plain = Data.model_validate({"path": "none", "chat_template": True})
    assert "RED:4" in Reader(plain, other).document(Row("here", GOOD)).text


def test_what_the_tokenizer_lacks_is_said() -> None:
    with pytest.raises(DataError, match="no chat template"):
        Reader(Data(path="none", chat_template=True), TOKENIZER)
    endless = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER.backend_tokenizer)
    with pytest.raises(DataError, match="no end token"):
        Reader(Data(path="none"), endless)
    assert Reader(Data(path="none", end=False), endless).end == ""
    endless.add_special_tokens({"eos_token": AddedToken("stop", single_word=True)})
    with pytest.raises(DataError, match="'stop' is not a single token in a text"):
        Reader(Data(path="none"), endless)


def test_a_hidden_file_is_read_if_it_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / ".a.jsonl", numbered(3))
    assert len(texts(opened(path, rows=3), 0)) == 3
    with pytest.raises(DataError, match=r"It has no \.jsonl"):
        opened(tmp_path)


def test_every_size_of_generated_documents_is_checked_first() -> None:
    """The number of pairs is drawn in every step, so the first step may fit when a later one does not."""
    for context, fits in ((2000, True), (300, False)):
        for seed in range(3):
            many = Source.model_validate({"task": "kv_retrieval", "pairs": [4, 64], "rows": 1})
            if fits:
                assert open_source(many, TOKENIZER, seed, 0, context=context).step(0)
                continue
            with pytest.raises(DataError, match="The model takes at most 300"):
                open_source(many, TOKENIZER, seed, 0, context=context)
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


def refused(document: Document, tokenizer: PreTrainedTokenizerFast = TOKENIZER) -> tuple[bool, bool]:
    """Whether the check refuses it, and whether encoding does."""
    found = []
    for attempt in (lambda: check_documents([document], tokenizer), lambda: encode([document], tokenizer)):
        try:
            attempt()
            found.append(False)
        except (DataError, ProbeError):
            found.append(True)
    return found[0], found[1]


def test_what_the_check_lets_through_can_be_encoded_and_nothing_else() -> None:
    rng, seen = rng_of("agree"), Counter()
    for _ in range(150):
        text = random_text(rng.randint(0, 99), 3) + "end"
        start = rng.randint(1, len(text) - 2)
        value = (0, rng.randint(1, start))
        check, encoded = refused(Document("t", text, (Question((start, len(text)), (), -1, value, value),)))
        assert check == encoded, (text, start)
        seen[check] += 1
    assert min(seen[True], seen[False]) > 20


def test_a_token_with_the_first_byte_of_an_answer_is_refused() -> None:
    alphabet = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    backend = Tokenizer(BPE({**alphabet, "ĠÃ": len(alphabet)}, [("Ġ", "Ã")]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="!")
    assert refused(Document("t", "is é", (Question((3, 4), (), -1),)), tokenizer) == (True, True)
    assert refused(Document("t", "is:é", (Question((3, 4), (), -1),)), tokenizer) == (False, False)


def test_nothing_to_train_on_is_an_error(tmp_path: Path) -> None:
    for streaming in (False, True):
        with pytest.raises(DataError, match="no rows"):
            opened(write(tmp_path / "a.jsonl", [""]), streaming=streaming)
        with pytest.raises(DataError, match=r"none of its 2 rows.*a\.jsonl:\d"):
            opened(write(tmp_path / "a.jsonl", ["{", "{"]), streaming=streaming, on_bad_row="skip")
    with pytest.raises(DataError, match="none of its 2 rows"):
        read_documents(Data(path=str(tmp_path / "a.jsonl"), on_bad_row="skip"), TOKENIZER)


# files, folders, the Hub


def test_every_format_holds_the_same_rows(tmp_path: Path) -> None:
    rows = numbered(7)
    lines = write(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1))
    write(tmp_path / "c.json", rows)
    write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    write(tmp_path / "e" / "1.jsonl", rows[:3])
    write(tmp_path / "e" / "2.jsonl", [])
    write(tmp_path / "e" / "more" / "3.jsonl", rows[3:])
    (tmp_path / "f").mkdir()
    write_table(pyarrow.Table.from_pylist(rows).slice(0, 0), tmp_path / "f" / "1.parquet")
    write_table(pyarrow.Table.from_pylist(rows), tmp_path / "f" / "2.parquet")
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
    write_table(pyarrow.Table.from_pylist([*numbered(2), bad]), tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps([bad]))
    for name, where in (("in", "in/2.jsonl:3"), ("a.parquet", "a.parquet: row 3"), ("a.json", "a.json: row 1")):
        for streaming in (False, True):
            with pytest.raises(DataError, match="answer is empty") as error:
                opened(tmp_path / name, rows=9, streaming=streaming)
            assert error.value.field == f"{tmp_path}/{where}"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_a_file_without_rows_is_refused(tmp_path: Path, name: str, streaming: bool) -> None:
    if name == "a.parquet":
        write_table(pyarrow.Table.from_pylist(numbered(1)).slice(0, 0), tmp_path / name)
    else:
        (tmp_path / name).write_text("[]" if name == "a.json" else "\n")
    with pytest.raises(DataError, match=rf"{name}: no row"):
        opened(tmp_path / name, streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_parquet_file_with_a_damaged_page_is_refused(tmp_path: Path, streaming: bool) -> None:
    write_table(pyarrow.Table.from_pylist(numbered(200)), tmp_path / "a.parquet", compression="none")
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[4:40] = bytes(36)
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(DataError, match=r"a\.parquet.*cannot be read"):
        opened(tmp_path / "a.parquet", rows=9, streaming=streaming)


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


def bad_paths(root: Path) -> Iterator[tuple[dict[str, str], str]]:
    """Data that is not there, or cannot be read, and what is said."""
    yield {"path": f"{root}/none"}, "No such file"
    yield {"path": "data/none.jsonl"}, "No such file"
    yield {"path": "parquet"}, "No such file"
    (root / "empty").mkdir()
    yield {"path": f"{root}/empty"}, "It has no .jsonl"
    (root / "a.csv").write_text("a,b\n")
    yield {"path": f"{root}/a.csv"}, "A .csv is not read"
    (root / "wide.jsonl").write_bytes('{"prompt": "a", "answer": "b"}\n'.encode("utf-16"))
    yield {"path": f"{root}/wide.jsonl"}, "UTF-16, not UTF-8. Save the file in UTF-8."
    (root / "none.jsonl").write_text("")
    yield {"path": f"{root}/none.jsonl", "holdout": 0.1}, "no rows. Add at least one."
    write(root / "other.jsonl", [{"question": "a", "reply": "b"}])
    yield (
        {"path": f"{root}/other.jsonl"},
        "train.sources.0.data.columns.prompt=question or locate.data.columns.prompt=question.",
    )
    write(root / "chats.jsonl", [{"messages": []}])
    yield {"path": f"{root}/chats.jsonl"}, "such as train.sources.0.data.columns.messages=messages or"
    write(root / "short.jsonl", [{"prompt": "a", "answer_span": [0, 1]}])
    yield {"path": f"{root}/short.jsonl"}, "such as train.sources.0.data.columns.answer=NAME or"
    (root / "hole.jsonl").write_bytes(json.dumps(GOOD).encode() + b"\n\0\0\n")
    yield {"path": f"{root}/hole.jsonl"}, f"{root}/hole.jsonl:2: NUL bytes"
    write(root / "long.jsonl", [{"prompt": "a" * 2**23, "answer": "b"}])
    yield {"path": f"{root}/long.jsonl"}, f"{root}/long.jsonl:1: a text of 8,388,6"
    for name, begins in (("lines.jsonl", f"{json.dumps(GOOD)}\n"), ("list.json", "[")):
        (root / name).write_text(begins)
        os.truncate(root / name, 2**40)  # without blocks on the disk
        yield (
            {"path": f"{root}/{name}"},
            "a JSON list of more than 1024 MiB" if begins == "[" else ":2: a line of more than",
        )
    (root / "pipes").mkdir()
    os.mkfifo(root / "pipes" / "a.jsonl")
    for path in (root / "pipes", root / "pipes" / "a.jsonl"):
        yield {"path": str(path)}, "a.jsonl. It is no regular file"
    write(root / "mixed" / "a.jsonl", numbered(1))
    write(root / "mixed" / "b.json", numbered(1))
    yield {"path": f"{root}/mixed"}, ".json and .jsonl"
    write(root / "a.jsonl", numbered(1))
    yield {"path": f"{root}/a.jsonl", "split": "test"}, "Remove `split`"
    yield {"path": f"{root}/a.jsonl", "revision": "main"}, "apply to Hub data sets"
    (root / "a.json").write_text('[{"prompt": "a"\n"answer": "b"}]')
    yield {"path": f"{root}/a.json"}, f"{root}/a.json:2: not JSON"
    write(root / "a.parquet", numbered(1))
    yield {"path": f"{root}/a.parquet"}, "not a Parquet file"
    write_table(pyarrow.table({"prompt": ["a"], "reply": ["b"]}), root / "b.parquet")
    yield {"path": f"{root}/b.parquet"}, "no column 'answer'. The columns are prompt, reply"


@pytest.mark.parametrize("streaming", [False, True])
def test_what_cannot_be_read_is_one_clear_error(tmp_path: Path, streaming: bool) -> None:
    for data, said in bad_paths(tmp_path):
        with pytest.raises(DataError) as error:
            opened(data.pop("path"), streaming=streaming, **data)
        assert said in str(error.value)


def test_rows_inside_an_object_are_refused_with_a_command_that_unwraps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrapped = [
        {"data": numbered(3)},
        {"version": 1, 'of "us"': {"train": numbered(3)}},
        {"a": {"prompt": []}, "b": numbered(3)},
    ]
    for number, (rows, suffix, indent) in enumerate(itertools.product(wrapped, ("json", "jsonl"), (None, 1))):
        Path(f"it's {number}.{suffix}").write_text(json.dumps(rows, indent=indent))
        with pytest.raises(DataError, match="one JSON object, whose list") as error:
            opened(f"it's {number}.{suffix}")
    command = error.value.hint.removeprefix("Write one row a line: ").partition(". Then")[0]
    subprocess.run(command, shell=True, check=True)
    assert len(open_rows(Data(path="rows.jsonl"))) == 3
    one = {"prompt": "a\n", "answer": "b", "options": [{"x": 1}]}, {"messages": [{"role": "user", "content": "a"}]}
    for row in one:
        assert len(open_rows(Data(path=str(write(tmp_path / "one.jsonl", [row]))))) == 1


def test_a_key_twice_in_a_row_is_noted_once_for_each_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    twice = json.dumps(GOOD)[:-1] + ', "n": 2}'
    path = write(tmp_path / "a.jsonl", [GOOD, twice, twice])
    assert len(opened(path, rows=9).step(1)) == 9
    assert [r.getMessage() for r in caplog.records] == [
        f"{path}:2: the key 'n' is there twice, and the last value counts. Keep one."
    ]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_hub_that_does_not_answer_is_one_clear_error(streaming: bool) -> None:
    with pytest.raises(DataError, match="owner/absent: loading from the Hub failed") as error:
        opened("owner/absent", streaming=streaming)
    assert error.value.__suppress_context__


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


def test_a_token_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, OSError("401 for https://user:hf_aBcD1234@host"))
    with pytest.raises(DataError, match=r"401 for https://user:hf_\.\.\.@host"):
        opened("owner/gated")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_set_is_read_by_its_columns(monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    rows = [{**row, "more": i} for i, row in enumerate(numbered(6))]
    asked = fake_hub(monkeypatch, datasets.Dataset.from_list(rows))
    stream = opened("owner/name", rows=6, streaming=streaming, name="small", split="dev", revision="v1")
    assert asked == [("owner/name", "small", "dev", "v1", streaming)]
    assert {d.task for d in stream.step(0)} == {"owner/name"}
    assert sorted(texts(stream, 0)) == sorted(f"{r['prompt']}{r['answer']}{END}" for r in rows)
    with pytest.raises(DataError, match=r"no column 'q'\. The columns are prompt, answer, more"):
        opened("owner/name", streaming=streaming, columns={"prompt": "q"})
    read, _ = read_documents(Data(path="owner/name", streaming=streaming), TOKENIZER, limit=2)
    assert [d.text for d in read] == [f"{r['prompt']}{r['answer']}{END}" for r in rows[:2]]


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", numbered(4))
    stream = opened(path)
    write(path, [*numbered(4), GOOD])
    with pytest.raises(DataError, match="changed while it was in use"):
        stream.step(0)


# which documents a step sees


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
    assert whole.skipped == again.skipped == 1


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
@pytest.mark.parametrize("budget", [1, 25, 60, 500])
def test_a_budget_is_filled_as_far_as_documents_go(tmp_path: Path, how: dict[str, Any], budget: int) -> None:
    stream = opened(write(tmp_path / "a.jsonl", numbered(10, 3)), tokens=budget, **how)
    steps = [stream.step(step) for step in range(6)]
    for documents, following in pairwise(steps):
        used = sum(map(length, documents))
        assert len(documents) == 1 or used <= budget
        assert used + length(following[0]) > budget


def text_held_by(root: object, apart: object) -> int:
    """Characters of all text that can be reached from an object, but not through another, nor through code."""
    waiting, seen, held = [root], {id(apart)}, 0
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(found))
        held += len(found) if isinstance(found, (str, bytes)) else 0
        waiting += gc.get_referents(found)
    return held


def test_texts_are_not_kept_in_memory(tmp_path: Path) -> None:
    rows = [{"t": " ".join(["word"] * 40) + str(i)} for i in range(200)]
    path = write(tmp_path / "a.jsonl", rows)
    stream = opened(path, columns={"text": "t"}, max_tokens=30)
    assert len(stream.step(0)) == 4
    assert text_held_by([stream, rows], TOKENIZER) > path.stat().st_size / 2, "the measure can fail"
    assert text_held_by(stream, TOKENIZER) < path.stat().st_size / 5


# answers that are found in the prompt


FOX = {"prompt": "fox:12\nowl: 345\nWhere is the owl?\n", "answer": " 345"}
TWICE = {"prompt": "fox:7\nowl:7\nWhere is the owl?\n", "answer": "7"}
ABSENT = {"prompt": "fox:123\nWhere is the owl?\n", "answer": "12"}
FORMS = ["a.jsonl", "a.json", "a.parquet"]


def searched(path: Path | str, **data: Any) -> Source:
    return source(path, rows=3, columns={"answer_span": "auto"}, **data)


def stored(path: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows in the format of the name."""
    if path.suffix == ".parquet":
        write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        write(path, rows)
    return path


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_an_answer_that_occurs_once_is_its_span(tmp_path: Path, name: str, streaming: bool) -> None:
    path = stored(tmp_path / name, [FOX, TWICE, ABSENT])
    stream = open_source(searched(path, streaming=streaming), TOKENIZER, 0, 0)
    by_text = {d.text: d.questions[0] for d in stream.step(0)}
    fox, *others = (by_text[f"{row['prompt']}{row['answer']}{END}"] for row in (FOX, TWICE, ABSENT))
    assert fox.value == (12, 15) and fox.segment == (7, 16)
    assert FOX["prompt"][slice(*fox.value)] == "345" and FOX["prompt"][slice(*fox.segment)] == "owl: 345\n"
    assert all(question.value is None and question.segment is None for question in others)
    batch = encode(stream.step(0), TOKENIZER)
    assert int((batch.answer_token >= 0).sum()) == int((batch.segment_end >= 0).sum()) == 1


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_marked_rows_are_read_as_before(tmp_path: Path, name: str, streaming: bool) -> None:
    """The documents of a file with spans are the same with `auto`, even where the answer occurs twice."""
    rows = [{**FOX, "answer_span": [12, 15]}, {**TWICE, "answer_span": [10, 11]}]
    path = stored(tmp_path / name, rows)
    named, auto = (
        open_source(source(path, columns={"answer_span": c}, streaming=streaming), TOKENIZER, 0, 0)
        for c in ("answer_span", "auto")
    )
    assert [named.step(i) for i in range(4)] == [auto.step(i) for i in range(4)]
    bad = stored(tmp_path / f"bad_{name}", [*rows, {**FOX, "answer_span": [0, 3]}])
    with pytest.raises(DataError, match=r"the span .* but the answer is ' 345'"):
        open_source(searched(bad, streaming=streaming), TOKENIZER, 0, 0)


def test_a_named_column_is_required_as_before(tmp_path: Path) -> None:
    for name in FORMS:
        path = stored(tmp_path / name, [FOX])
        with pytest.raises(DataError, match=r"answer_span|the span is None"):
            open_source(source(path, columns={"answer_span": "answer_span"}), TOKENIZER, 0, 0)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_set_may_lack_the_column(monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    for more, value in (({}, (12, 15)), ({"answer_span": [12, 15]}, (12, 15))):
        fake_hub(monkeypatch, datasets.Dataset.from_list([{**FOX, **more, "n": 1}] * 3))
        stream = open_source(searched("owner/name", streaming=streaming), TOKENIZER, 0, 0)
        assert {d.questions[0].value for d in stream.step(0)} == {value}


def test_in_a_chat_the_whole_prompt_is_searched(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    """An answer that an earlier message has too is ambiguous."""
    data = Data.model_validate({"path": "none", "columns": {"messages": "m", "answer_span": "auto"}})
    system = {"role": "system", "content": "Numbers of owls."}
    chat = [{"role": "user", "content": FOX["prompt"]}, {"role": "assistant", "content": "345"}]
    (question,) = Reader(data, chat_tokenizer).document(Row("here", {"m": [system, *chat]})).questions
    text = Reader(data, chat_tokenizer).document(Row("here", {"m": [system, *chat]})).text
    assert question.value is not None and text[slice(*question.value)] == "345"
    again = {"role": "system", "content": "It was 345."}
    (question,) = Reader(data, chat_tokenizer).document(Row("here", {"m": [again, *chat]})).questions
    assert question.value is None


def counted(*sources: Source) -> dict[str, dict[str, int]]:
    return count_answer_spans(Train(sources=sources), TOKENIZER)


@pytest.mark.parametrize("streaming", [False, True])
def test_training_rows_are_counted_by_place(tmp_path: Path, streaming: bool) -> None:
    rows = [{**FOX, "prompt": f"{i}x\n{FOX['prompt']}"} for i in range(70)]
    rows += [{**TWICE, "prompt": f"{i}x\n{TWICE['prompt']}"} for i in range(50)]
    rows += [{**ABSENT, "prompt": f"{i}x\n{ABSENT['prompt']}"} for i in range(40)]
    path = write(tmp_path / "a.jsonl", rows)
    more = {"first_rows": 1000} if streaming else {}
    everything = {"found": 70, "ambiguous": 50, "missing": 40, **more}
    assert counted(searched(path, streaming=streaming)) == {"a.jsonl": everything}
    held = searched(path, streaming=streaming, holdout=0.3)
    reader = Reader(held.data or Data(path=""), TOKENIZER, held_out=True)
    kept = sum(1 for _ in reader.read(rows_in_order(reader.data)))
    assert kept and reader.spans.total() == kept
    sides = {key: counted(held)["a.jsonl"][key] + reader.spans[key] for key in ("found", "ambiguous", "missing")}
    assert {**sides, **more} == everything


def test_marked_and_skipped_rows_are_told_apart(tmp_path: Path) -> None:
    marked = {**TWICE, "answer_span": [10, 11]}
    path = write(tmp_path / "a.jsonl", [FOX, marked, marked, "{", ABSENT])
    found = counted(searched(path, on_bad_row="skip"), source(path), searched(path, on_bad_row="skip"))
    assert found == {"a.jsonl": {"found": 1, "ambiguous": 0, "missing": 1, "marked": 2}}


def test_data_that_is_marked_throughout_is_not_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{**FOX, "answer_span": [12, 15]}] * 3)
    assert counted(searched(path)) == {}
    text = source(path, columns={"text": "prompt", "answer_span": "auto"})
    assert counted(text) == {}
