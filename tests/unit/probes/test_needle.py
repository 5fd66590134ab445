"""Needles in RULER's text: as long as asked for, as deep as asked for, and nothing but the needles says the numbers."""

from __future__ import annotations

from functools import cache
from typing import get_args

import pytest

from surgery.data.encoding import encode
from surgery.errors import ProbeError
from surgery.probes.documents import Document, Split, rng_of
from surgery.probes.needle import Kind, needle_document, token_count
from surgery.probes.phonebook import space_of
from surgery.probes.words import key_words
from tests.support.pico import pico_tokenizer
from tests.support.samples import cut

KINDS = get_args(Kind)
SIZE = token_count(pico_tokenizer())


@cache
def made(kind: Kind, depth: float = 0.5, length: int = 400, seed: int = 0) -> Document:
    space = space_of(pico_tokenizer())
    return needle_document(rng_of("needle", seed), length, SIZE, kind, depth, split="eval", space=space)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_text(kind: Kind) -> None:
    document = made(kind)
    first, *_ = document.text.split("\n")
    assert first.startswith("Some special magic numbers are hidden") and document.task == f"needle_{kind}"
    assert len(document.questions) == (1 if kind in ("single", "multi_key") else 4)
    for question in document.questions:
        number = cut(document, question.answer)
        key = cut(document, question.segment).split(" for ")[1].split(" is")[0]
        assert cut(document, question.segment) == f"One of the special magic numbers for {key} is: {number}."
        assert cut(document, question.value) == number == question.choices[question.gold]
        assert document.text.count(number) == 2 and number.isdigit() and len(number) == 7
        assert question.segment is not None and question.segment[1] < question.answer[0]
        assert f" for {key}" in document.text.split("\n")[-1] or f" {key} " in document.text.split("\n")[-1].replace(
            ",", " "
        )
    hidden = document.text.count("One of the special magic numbers for ")
    assert hidden == (1 if kind == "single" else 4)
    in_text = [choice for choice in document.questions[0].choices if choice in document.text]
    assert len(in_text) == hidden and len(document.questions[0].choices) == (10 if kind == "single" else 4)


@pytest.mark.parametrize("kind", ["multi_value", "multi_query"])
def test_several_are_asked_for_in_one_list_and_in_order(kind: Kind) -> None:
    document = made(kind)
    numbers = [cut(document, q.answer) for q in document.questions]
    assert document.text.endswith(f" are {', '.join(numbers)}.")
    if kind == "multi_value":
        starts = [q.segment[0] for q in document.questions if q.segment]
        assert starts == sorted(starts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [320, 700])
def test_as_long_as_fits(kind: Kind, length: int) -> None:
    """No sentence of the haystack is as long as the room that is left."""
    document = made(kind, length=length)
    used = SIZE(document.text[: document.questions[-1].answer[1]])
    assert length - 60 < used <= length


def test_depth_is_the_share_of_the_text_before_the_needle() -> None:
    for depth in (0.0, 0.25, 0.5, 1.0):
        document = made("single", depth, 600)
        segment = document.questions[0].segment
        assert segment is not None
        begin, end = document.text.index("\n") + 1, document.text.index("\nWhat")
        room = end - begin - (segment[1] - segment[0])
        assert (segment[0] - begin) / room == pytest.approx(depth, abs=0.08)


@pytest.mark.parametrize("kind", KINDS)
def test_positions_in_tokens(kind: Kind) -> None:
    document = made(kind)
    batch = encode([document], pico_tokenizer())
    for q, question in enumerate(document.questions):
        value, after = (int(x[0, q]) for x in (batch.answer_token, batch.query + 1))
        assert batch.input_ids[0, value] == batch.input_ids[0, after] == batch.target[0, q]
        assert batch.segment_start[0, q] < value < batch.segment_end[0, q] < batch.query[0, q]
        assert batch.gold[0, q] == question.gold


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_same_seed_gives_the_same_and_keys_are_of_the_split(split: Split) -> None:
    one, again, other = (needle_document(rng_of(s), 300, SIZE, "multi_key", split=split) for s in (1, 1, 2))
    assert one == again and one.text != other.text
    keys = {part.split(" is:")[0] for part in one.text.split("special magic numbers for ")[1:]}
    assert len(keys) == 4 and keys <= set(key_words(split))


@pytest.mark.parametrize(
    ("length", "depth", "needles", "field"), [(20, 0.5, 4, "tokens"), (400, 1.5, 4, "depth"), (400, 0.5, 1, "needles")]
)
def test_what_cannot_be_made_is_refused(length: int, depth: float, needles: int, field: str) -> None:
    with pytest.raises(ProbeError) as caught:
        needle_document(rng_of(0), length, SIZE, "multi_key", depth, needles)
    assert caught.value.field == field
