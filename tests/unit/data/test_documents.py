"""Rows of the user's own: what they become, how long texts are cut, and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace
from transformers import AddedToken, PreTrainedTokenizerFast

from surgery.data.columns import Row
from surgery.data.documents import Reader, check_documents
from surgery.data.encoding import encode
from surgery.data.pieces import cut
from surgery.errors import DataError, ProbeError
from surgery.probes.documents import Document, Question, rng_of
from surgery.recipe import Data
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.pico import pico_tokenizer

TOKENIZER = pico_tokenizer()
END = TOKENIZER.eos_token
CHAT = (
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content | trim }}\n{% endfor %}"
    "{% if messages[0].role == 'tool' %}{{ raise_exception('tool comes first') }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
GOOD = {"prompt": "red:4\nblue:7\nblue is", "answer": "7", "at": [11, 12], "n": 1}


def chat_tokenizer(template: str = CHAT) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER.backend_tokenizer, eos_token=END)
    tokenizer.chat_template = template
    return tokenizer


def document_of(row: dict[str, Any], tokenizer: Any = TOKENIZER, span: str | None = None, **data: Any) -> Document:
    given = {"path": "none", **data}
    if span is not None:
        given["columns"] = {**given.get("columns", {}), "answer_span": span}
    return Reader(Data.model_validate(given), tokenizer).document(Row("a.jsonl:3", row))


def refusal(row: dict[str, Any], tokenizer: Any = TOKENIZER, **data: Any) -> str:
    with pytest.raises(DataError) as error:
        document_of(row, tokenizer, **data)
    assert error.value.field == "a.jsonl:3"
    return str(error.value)


def test_prompt_and_answer_are_one_text_and_the_answer_ends_it() -> None:
    """Without an end token the text stops at the answer; one that the answer has is not doubled."""
    for row, data, ended in ((GOOD, {}, END), (GOOD, {"end": False}, ""), ({**GOOD, "answer": f"7{END}"}, {}, END)):
        question = Question((20, 21 + len(ended)), (), -1)
        assert document_of(row, **data) == Document("none", f"{GOOD['prompt']}7{ended}", (question,))


def test_spans_stand_on_their_tokens() -> None:
    batch = encode([document_of(GOOD, span="at")], TOKENIZER)
    shown = TOKENIZER.convert_ids_to_tokens(batch.input_ids[0].tolist())
    at = {name: int(getattr(batch, name)[0, 0]) for name in ("query", "answer_token", "segment_start", "segment_end")}
    assert [shown[at["query"]], shown[at["answer_token"]]] == [TOKENIZER.tokenize("blue is")[-1], "7"]
    assert TOKENIZER.decode(batch.input_ids[0, at["segment_start"] : at["segment_end"] + 1]) == "blue:7\n"
    assert TOKENIZER.decode(batch.input_ids[0, batch.answers[0]]) == f"7{END}"
    assert batch.gold.tolist() == [[-1]]


def test_a_segment_is_the_line_of_the_span_and_ends_before_the_query() -> None:
    for prompt, span, line in (
        ("a:1\nb:2\nis", [2, 3], "a:1\n"),
        ("a:1\nb:2\nis", [6, 7], "b:2\n"),
        ("a:1\nb:2\nis", [2, 7], "a:1\nb:2\n"),
        ("a:1\nb:2\nis", [2, 4], "a:1\n"),
        ("a:1\nb is 2. b is:", [9, 10], "b is 2"),
        ("only 7 here\n \n", [5, 6], "only 7"),
    ):
        (question,) = document_of(
            {"prompt": prompt, "answer": f" {prompt[slice(*span)]}", "at": span}, span="at"
        ).questions
        assert question.segment is not None and prompt[slice(*question.segment)] == line
        assert question.value == tuple(span)


def test_a_chat_is_the_template_and_the_last_message() -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "  red:4\nblue is", "name": None},
        {"role": "assistant", "content": "4"},
    ]
    columns = {"messages": "m"}
    document = document_of({"m": messages, "at": [6, 7]}, chat_tokenizer(), span="at", columns=columns)
    question, prompt = document.questions[0], "<user>\nhi\n<assistant>\nyes\n<user>\nred:4\nblue is\n<assistant>\n"
    assert document.text == f"{prompt}4{END}"
    spans = (question.answer, question.value, question.segment)
    assert [document.text[slice(*span)] for span in spans if span] == [f"4{END}", "4", "red:4\n"]
    pair = [{"role": "user", "content": GOOD["prompt"]}, {"role": "assistant", "content": "7"}]
    said = document_of({"m": pair, "at": [11, 12]}, chat_tokenizer(), span="at", columns=columns)
    plain = document_of({**GOOD, "answer_span": [11, 12]}, chat_tokenizer(), span="auto", chat_template=True)
    assert said == plain, "prompt and answer are two messages"


def test_a_row_that_is_none_is_refused_by_its_line() -> None:
    for row, said in (
        ({"prompt": "a"}, "`answer` is missing. The row has prompt. Set `data.columns`"),
        ({"prompt": "a", "answer": None}, "`answer` is null"),
        ({"prompt": "a", "answer": 7}, "It has type int"),
        ({"prompt": ["a"], "answer": "7"}, "It has type list"),
        ({"prompt": "a\n", "answer": " "}, "answer is empty"),
        ({"prompt": "", "answer": "b"}, "prompt is empty"),
        ({"prompt": "a\ud800\n", "answer": "b"}, "not Unicode"),
        ({"prompt": "a" * 2**23, "answer": "b"}, "a text of 8,388,6"),
    ):
        assert said in refusal(row), said


def test_a_span_that_does_not_hold_the_answer_is_refused() -> None:
    prompt, place = "fox:1234\nowl: 5678\nThe owl's is", 14
    row = {"prompt": prompt, "answer": " 5678"}
    for span, said in (
        ([11, 11], "not empty"),
        ([12, 11], "not empty"),
        ([-1, 3], "not empty"),
        ([11, 99], f"inside the prompt of {len(prompt)} characters"),
        ([1.0, 2], "two integers"),
        ([True, 2], "two integers"),
        ("11:12", "two integers"),
        (None, "two integers, or set `data.columns.answer_span: auto`"),
    ):
        assert said in refusal({**row, "at": span}, span="at"), span
    for tokenizer, chat in ((TOKENIZER, False), (chat_tokenizer(), True)):
        for off in ((-2, -2), (1, 1), (0, -1), (0, 2), (-4, -1), (4 - place, 4 - place)):
            span = [place + off[0], place + 4 + off[1]]
            said = f"the span [{span[0]}, {span[1]}) is {prompt[slice(*span)]!r}, but the answer is ' 5678'. "
            found = refusal({**row, "at": span}, tokenizer, span="at", chat_template=chat)
            assert said + "The prompt has the answer at [14, 18)" in found
        for before, after in ((0, 0), (1, 0), (0, 1), (1, 1)):  # whitespace around it does not count
            good = {**row, "at": [place - before, place + 4 + after]}
            document = document_of(good, tokenizer, span="at", chat_template=chat)
            assert document.questions[0].value is not None
            assert document.text[document.questions[0].value[0] :].startswith("5678")
    assert "`at` is missing" in refusal(row, span="at")
    assert "the span [0, 3)" in refusal({**row, "answer_span": [0, 3]}, span="auto")


def test_a_chat_that_is_none_is_refused() -> None:
    said_by = {role: {"role": role, "content": "hi"} for role in ("user", "assistant", "tool")}
    for messages, said in (
        ("hi", "list of"),
        ([said_by["assistant"]], "list of"),
        ([said_by["user"]] * 2, "the last message has the role 'user'"),
        ([{"role": "user", "content": ["hi"]}, said_by["assistant"]], "message {'role'"),
        ([said_by["tool"], said_by["assistant"]], "tool comes first"),
    ):
        assert said in refusal({"m": messages}, chat_tokenizer(), columns={"messages": "m"}), said


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


def random_text(seed: int, words: int) -> str:
    rng = rng_of("cut", seed)
    letters = "abcdefg éß漢🙂\n 0123456789"
    return " ".join("".join(rng.choice(letters) for _ in range(rng.randint(1, 12))) for _ in range(words))


def pieces_of(text: str, limit: int, tokenizer: Any = TOKENIZER, tokens: Any = None) -> list[str]:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens = tokens or (lambda part: tokenizer(part, add_special_tokens=False)["input_ids"])
    pieces = cut(text, encoded["input_ids"], encoded["offset_mapping"], limit, tokens)
    parts = [text[slice(*span)] for span, _ in pieces]
    assert "".join(parts) == text
    assert all(length == len(tokens(part)) <= limit for part, (_, length) in zip(parts, pieces, strict=True))
    return parts


def test_pieces_are_the_text_and_have_its_tokens() -> None:
    for seed in range(8):
        for limit in (5, 17, 1000):
            text = random_text(seed, 30)
            ids = TOKENIZER(pieces_of(text, limit), add_special_tokens=False)["input_ids"]
            assert [i for part in ids for i in part] == TOKENIZER(text, add_special_tokens=False)["input_ids"]


def test_a_cut_leaves_the_tokens_as_they_are() -> None:
    """Not where the end of a word, or the last token of a piece, would become another token."""
    backend = Tokenizer(WordPiece({"[UNK]": 0, "un": 1, "##able": 2, "able": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    words = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    assert pieces_of("unable able unable unable", 4, words) == ["unable able ", "unable unable"]

    def tokens(part: str) -> list[int]:  # one a character, and a space at the end is a token of its own kind
        return [0 if part[i:] == " " else ord(c) for i, c in enumerate(part)]

    pieces = cut("ab cd ef", tokens("ab cd ef"), [(i, i + 1) for i in range(8)], 3, tokens)
    assert ["ab cd ef"[slice(*span)] for span, _ in pieces] == ["ab", " cd", " ef"]


def is_refused(document: Document, tokenizer: PreTrainedTokenizerFast = TOKENIZER) -> tuple[bool, bool]:
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
    rng, seen = rng_of("agree"), Counter[bool]()
    for _ in range(150):
        text = random_text(rng.randint(0, 99), 3) + "end"
        start = rng.randint(1, len(text) - 2)
        value = (0, rng.randint(1, start))
        check, encoded = is_refused(Document("t", text, (Question((start, len(text)), (), -1, value, value),)))
        assert check == encoded, (text, start)
        seen[check] += 1
    assert min(seen[True], seen[False]) > 20
    tokenizer = byte_tokenizer(("Ġ", "Ã"))  # a token with the space and the first byte of the answer
    for prompt, refused in (("is ", True), ("is:", False)):
        document = Document("t", f"{prompt}é", (Question((3, 4), (), -1),))
        assert is_refused(document, tokenizer) == (refused, refused)
