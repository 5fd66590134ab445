"""Documents of every probe with an answer in its text: what a naive reader finds there is the answer that they give."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from surgery.data.encoding import encode
from surgery.errors import ProbeError
from surgery.probes.documents import Document, rng_of
from surgery.probes.knowledge import facts, letter_choice
from surgery.probes.mqar import mqar_words, single_token_words
from surgery.probes.needle import token_count
from surgery.probes.phonebook import spaces
from surgery.probes.registry import PROBES, Options
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.pico import pico_tokenizer
from tests.support.samples import cut

NAME = re.compile(r"\b(?!In\b|A\b|The\b)([A-Z][a-z]{3,})\b")


def listed(text: str) -> dict[str, str]:
    """Values of a dictionary in KV-retrieval's text, the first of each key."""
    lines = re.findall(r"^(\w+)(?: \w+)*:(\w+)(?: \w+)?$", text, re.M)
    return dict(reversed(lines))


def follow(text: str) -> str:
    values, key = listed(text), re.findall(r"from the key '(\w+)'", text)[0]
    while not key.isdigit():
        key = values[key]
    return key


def recorded(text: str) -> str:
    body, question = text.rsplit("\n", 1)
    name = NAME.findall(question.replace("The agent", "").replace("The case", ""))[0]
    return next(number for line, number in re.findall(r"([^.]+?)agent (\d+)\.", body) if name in line)


def hidden(text: str) -> str:
    """Of a list, the number after those that are there already."""
    numbers = re.findall(r"magic numbers for (\w+) is: ?(\d+)\.", text)
    question = text.rsplit("\n", 1)[1]
    keys = re.findall(r"\w+", question.split(" for ")[1].split(" mentioned")[0].replace(" and ", " "))
    answers = [number for key in keys for name, number in numbers if name == key]
    return answers[len(re.findall(r"\d{7}", question))]


READERS: dict[str, Callable[[str], str]] = {
    "kv_retrieval": lambda text: listed(text)[re.findall(r"key '(\w+)' is$", text)[0]],
    "phonebook": lambda text: dict(re.findall(r"^(\w+ \w+)(?: \w+)*: (\d+)$", text, re.M))[
        text.rsplit("\n", 1)[1].partition(":")[0]
    ],
    "json_kv": lambda text: dict(re.findall(r'"([0-9a-f-]+)(?: \w+)*": "([0-9a-f-]+)"', text))[
        re.findall(r'Key: "(.*)"', text)[-1]
    ],
    "mqar": lambda text: text.split()[text.split().index(text.split()[-1]) + 1],
    "multi_hop": follow,
    "records": recorded,
    "copying": lambda text: text.split("\n")[1],
    "key_echo": lambda text: re.findall(r"(\w+)(?: \w+)*:\d+$", text)[0],
    "kv_repeated": lambda text: listed(text)[re.findall(r"(\w+)(?: \w+)*:$", text)[0]],
    **dict.fromkeys(("needle_single", "needle_multi_key", "needle_multi_value", "needle_multi_query"), hidden),
}


ANSWER_OF = {(fact.relation, fact.name): fact.answer for fact in facts()}


def known(text: str) -> str:
    (asked,) = re.findall(r"^Question: What is the (.*) of (.*)\?$", text, re.M)
    return ANSWER_OF[asked]


def lettered(text: str) -> str:
    options = dict(re.findall(r"^([A-D])\. (.*)$", text, re.M))
    (letter,) = (letter for letter, option in options.items() if option == known(text))
    return letter


ABOUT_FACTS = {"closed_book": known, "option_text": known, "letter_choice": lettered}


def generated(task: str, seed: int = 0, split: Any = "eval", **options: Any) -> Document:
    given = {"pairs": 6, "tokens": 400, "tokenizer": pico_tokenizer(), **options}
    return PROBES[task].generate(rng_of("texts", task, seed), split, Options(**given))


@pytest.mark.parametrize("task", [*READERS, *ABOUT_FACTS])
def test_the_answer_is_what_a_reader_finds(task: str) -> None:
    probe, reader = PROBES[task], {**READERS, **ABOUT_FACTS}[task]
    takes = {"questions": {"questions": 3}, "filler": {"filler": (0, 4)}, "value_digits": {"value_digits": (3, 5)}}
    options: list[dict[str, Any]] = [
        {},
        {"pairs": 20},
        *(more for name, more in takes.items() if name in probe.options),
    ]
    for more in [*options, {"tokenizer": None, "tokens": 900}] if task != "mqar" else options:
        for seed in range(3):
            document = generated(task, seed, **more)
            assert len(document.questions) >= more.get("questions", 1), (more, seed)
            for question in document.questions:
                answer = cut(document, question.answer)
                assert reader(document.text[: question.answer[0]]) == answer.strip(), (more, seed)
                if question.choices:
                    assert question.choices[question.gold] == answer
                    assert len(set(question.choices)) == len(question.choices) > 1
                if probe.gold_position:
                    assert question.segment is not None and question.value is not None
                    assert question.segment[0] <= question.value[0] < question.value[1] <= question.segment[1]
                    assert cut(document, question.value).strip() == answer.strip()
                    assert question.segment[1] <= question.answer[0]


def test_gold_positions_hold_the_token_that_the_query_predicts() -> None:
    for task in READERS:
        document = generated(task, pairs=10)
        batch = encode([document], pico_tokenizer())
        for q, question in enumerate(document.questions):
            target = batch.target[0, q]
            assert batch.input_ids[0, batch.query[0, q] + 1] == target, task
            if PROBES[task].gold_position:
                assert batch.input_ids[0, batch.answer_token[0, q]] == target, task
                assert batch.segment_start[0, q] <= batch.answer_token[0, q] <= batch.segment_end[0, q], task
            if question.choices:
                assert batch.choice_ids[0, q, question.gold] == target, task


def test_what_cannot_be_made_is_refused() -> None:
    for task, options, words in (
        *((task, {"pairs": n}, f"{task} pairs: {n}. Use 2 to") for task in ("phonebook", "copying") for n in (1, 101)),
        *((task, {"questions": n}, f"{task} questions: {n}.") for task in ("records", "mqar") for n in (0, 7)),
        ("kv_retrieval", {"pairs": 101}, "kv_retrieval pairs: 101. Use 2 to 100"),
        ("multi_hop", {"hops": 1}, "hops: 1. One hop is kv_retrieval"),
        ("multi_hop", {"pairs": 5, "hops": 3}, "With 3 hops, two chains need 6 lines"),
        ("mqar", {"pairs": 60}, "There are .* keys and .* values. Use 2 to"),
        ("records", {"pairs": 11, "value_digits": (1, 1)}, "Only 10 numbers have 1 digits"),
        ("needle_multi_key", {"tokens": 20}, "tokens: 20. The question and its needles alone need"),
        ("needle_multi_key", {"needles": 1}, "needles: 1. Use 2 to 16"),
    ):  # fmt: skip
        with pytest.raises(ProbeError, match=words):
            generated(task, **options)  # type: ignore[arg-type]


def test_the_space_before_a_number_stands_where_the_tokenizer_has_it() -> None:
    """So one token tells ten numbers apart."""
    with_digit = byte_tokenizer(*(("\u0120", digit) for digit in "0123456789"))  # as GPT-NeoX's has them
    for tokenizer, expected in ((pico_tokenizer(), (" ", "")), (with_digit, ("", " "))):
        assert spaces(tokenizer) == expected
        document = generated("phonebook", pairs=10, tokenizer=tokenizer)
        assert len(set(encode([document], tokenizer).choice_ids[0, 0].tolist())) == 10
    assert spaces(None) == ("", " ")


def test_needles_fill_the_length_and_lie_as_deep_as_asked() -> None:
    size = token_count(pico_tokenizer())
    for task in [task for task in READERS if task.startswith("needle")]:
        document = generated(task, tokens=600)
        assert 540 < size(document.text[: document.questions[-1].answer[1]]) <= 600, task
        assert document.text.count("One of the special magic numbers for ") == (1 if task == "needle_single" else 4)
    for depth in (0.0, 0.25, 0.5, 1.0):
        document = generated("needle_single", tokens=600, depth=depth)
        start, end = document.questions[0].segment or (0, 0)
        begin, last = document.text.index("\n") + 1, document.text.index("\nWhat")
        assert (start - begin) / (last - begin - (end - start)) == pytest.approx(depth, abs=0.08)


def test_words_of_mqar_are_single_tokens_of_disjoint_lists() -> None:
    tokenizer = pico_tokenizer()
    (train, train_values), (other, other_values) = (mqar_words(tokenizer, split) for split in ("train", "eval"))
    assert encode([generated("mqar", pairs=12)], tokenizer).input_ids.shape == (1, 2 * 12 + 2)
    keys, values = (
        [tokenizer(f" {word}")["input_ids"] for word in words] for words in ((*train, *other), train_values)
    )
    assert {len(ids) for ids in (*keys, *values)} == {1} and max(keys) < min(values)
    assert not set(train) & set(other) and train_values == other_values
    assert single_token_words(byte_tokenizer()) == ()
    with pytest.raises(ProbeError, match="0 words of one token"):
        mqar_words(byte_tokenizer())


def test_words_between_are_in_the_lines_alone() -> None:
    """A document with them has the keys, values and questions of the one without."""
    for task in ("kv_retrieval", "phonebook", "json_kv", "multi_hop", "key_echo", "kv_repeated"):
        plain, filled = generated(task), generated(task, filler=(20, 20))
        numbers = re.compile(r"\d+")
        assert numbers.findall(plain.text) == numbers.findall(filled.text), task
        assert [q.gold for q in plain.questions] == [q.gold for q in filled.questions], task
        lines = 12 if task == "kv_repeated" else 6
        assert len(filled.text.split()) - len(plain.text.split()) == 20 * lines, task
        assert generated(task, filler=(0, 0)) == plain, task
    assert len(generated("records", filler=(3, 3)).text.split()) == len(generated("records").text.split()) + 6 * 3


def test_the_twin_of_a_letter_choice_asks_the_same_and_scores_the_text_of_the_option() -> None:
    for seed in range(30):
        letter, twin = letter_choice(rng_of(seed)), letter_choice(rng_of(seed), lettered=False)
        (lettered,), (question,) = letter.questions, twin.questions
        assert twin.text[: question.answer[0]] == letter.text.split("\n")[0] + "\nAnswer:"
        assert question.choices == tuple(f" {option}" for option in re.findall(r"^[A-D]\. (.*)$", letter.text, re.M))
        assert question.gold == lettered.gold and question.segment is question.value is None
