"""Records in prose: the number is the name's own, sentences of every template, names of the splits apart."""

from __future__ import annotations

import re

import pytest

from surgery.data.encoding import encode
from surgery.errors import ProbeError
from surgery.probes.documents import Document, rng_of
from surgery.probes.phonebook import Space
from surgery.probes.records import HEADER, QUESTIONS, TEMPLATES, records_document
from surgery.probes.words import key_words
from tests.support.pico import pico_tokenizer
from tests.support.samples import cut

NAME = re.compile(r"\b(?!In\b|A\b|The\b)([A-Z][a-z]{3,})\b")


def parts(document: Document) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Number by name in the records, and (name, number) of the questions, read from the text alone."""
    body = document.text.removeprefix(HEADER)
    records = re.findall(r"[^.]+?agent (\d+)\.", body)
    sentences = re.findall(r"[^.]+?agent \d+\.", body)
    numbers = {NAME.findall(sentence)[0]: number for sentence, number in zip(sentences, records, strict=True)}
    asked = re.findall(r"^.*?agent (\d+)$", body[body.rindex(".") + 1 :], re.M)
    names = NAME.findall(body[body.rindex(".") + 1 :].replace("The agent", "").replace("The case", ""))
    return numbers, list(zip(names, asked, strict=True))


@pytest.mark.parametrize("space", ["answer", "prompt"])
@pytest.mark.parametrize(("pairs", "questions"), [(2, 1), (2, 2), (9, 4), (90, 1)])
def test_the_answer_is_the_number_in_the_sentence_with_the_name(pairs: int, questions: int, space: Space) -> None:
    document = records_document(rng_of("text", pairs), pairs, questions, space=space)
    assert document.text.startswith(HEADER) and document.text.endswith("\n")
    numbers, asked = parts(document)
    assert len(numbers) == len(set(numbers.values())) == pairs
    assert len(asked) == len(dict(asked)) == len(document.questions) == questions
    before = " " if space == "answer" else ""
    for (name, number), question in zip(asked, document.questions, strict=True):
        assert numbers[name] == number
        assert cut(document, question.answer) == cut(document, question.value) == before + number
        assert question.choices == tuple(before + n for n in numbers.values())
        assert question.choices[question.gold] == before + number
        segment = cut(document, question.segment)
        assert name in segment and segment.endswith(f"agent {number}.") and segment.count("agent") == 1
        assert question.answer[0] > question.segment[1] and document.text[question.answer[1]] == "\n"


def test_the_same_seed_gives_the_same_document_and_another_one_another() -> None:
    one, again, other = (records_document(rng_of("seed", s), 6) for s in (1, 1, 2))
    assert one == again
    assert one.text != other.text


def test_every_template_and_question_and_both_separators_occur() -> None:
    texts = [records_document(rng_of("templates", i), 8, 2).text for i in range(60)]
    for _, ending in TEMPLATES:
        assert any(ending in text for text in texts)
    for question in QUESTIONS:
        assert any(question.split("{name}")[-1] in text for text in texts)
    in_lines = [text.removeprefix(HEADER).split("\n")[0].count(".") == 1 for text in texts]
    assert 15 <= sum(in_lines) <= 45


def test_any_record_may_be_asked_for() -> None:
    rng = rng_of("gold")
    asked = [records_document(rng, 4).questions[0].gold for _ in range(200)]
    assert all(30 <= asked.count(record) <= 70 for record in range(4))


def test_names_of_the_splits_are_disjoint() -> None:
    for split in ("train", "eval"):
        numbers, _ = parts(records_document(rng_of("split"), 80, split=split))
        assert {name.lower() for name in numbers} <= set(key_words(split))


@pytest.mark.parametrize(
    ("pairs", "questions", "digits", "field"),
    [(1, 1, None, "pairs"), (91, 1, None, "pairs"), (4, 5, None, "questions"), (4, 0, None, "questions"),
     (11, 1, (1, 1), "pairs"), (4, 1, (3, 2), "value_digits")],
)  # fmt: skip
def test_impossible_sizes_are_refused(pairs: int, questions: int, digits: tuple[int, int] | None, field: str) -> None:
    with pytest.raises(ProbeError) as caught:
        records_document(rng_of(0), pairs, questions, value_digits=digits)
    assert caught.value.field == field


def test_name_and_number_are_further_apart_than_a_short_convolution_sees() -> None:
    """Four tokens in the shipped base. The nearest template has more between them, and filler adds to it."""
    tokenizer = pico_tokenizer()
    for filler, least in ((None, 4), ((20, 20), 24)):
        for i in range(20):
            document = records_document(rng_of("far", i), 4, space="prompt", filler=filler)
            _, asked = parts(document)
            segment = cut(document, document.questions[0].segment)
            between = segment.split(asked[0][0])[1].removesuffix(f"{asked[0][1]}.")
            assert len(tokenizer(between, add_special_tokens=False)["input_ids"]) >= least


def test_one_token_tells_two_digit_numbers_apart() -> None:
    tokenizer = pico_tokenizer()
    document = records_document(rng_of("encode"), 30, space="prompt")
    batch, question = encode([document], tokenizer), document.questions[0]
    assert len(set(batch.choice_ids[0, 0].tolist())) == 30 and batch.choice_rest.shape[-1] == 0
    assert batch.input_ids[0, batch.answer_token[0, 0]] == batch.target[0, 0]
    assert tokenizer.decode(batch.input_ids[0, batch.segment_end[0, 0]]) == "."
    assert tokenizer.decode(batch.target[0, 0]) == question.choices[question.gold]
