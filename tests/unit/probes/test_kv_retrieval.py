"""KV-retrieval: the paper's exact text, seeded, its splits apart."""

from __future__ import annotations

import re

import pytest

from surgery.errors import ProbeError
from surgery.probes.documents import rng_of
from surgery.probes.kv_retrieval import NUM_VALUES, kv_document
from surgery.probes.words import key_words
from tests.support.pico import pico_tokenizer
from tests.support.samples import cut

TEXT = re.compile(
    r"Memorize the following dictionary:\n(?P<lines>(?:[a-z]+:\d{1,2}\n)+)"
    r"(?P<questions>(?:The value of the key '[a-z]+' is\d{1,2}(?:\n(?!$)|$))+)"
)


@pytest.mark.parametrize(("pairs", "questions"), [(2, 1), (2, 2), (5, 1), (24, 4), (100, 1)])
def test_exact_text(pairs: int, questions: int) -> None:
    document = kv_document(rng_of("text", pairs), pairs, questions)
    match = TEXT.fullmatch(document.text)
    assert match is not None, document.text
    entries = [line.split(":") for line in match["lines"].splitlines()]
    keys, values = zip(*entries, strict=True)
    assert len(set(keys)) == len(set(values)) == len(entries) == pairs
    assert all(str(int(v)) == v and 0 <= int(v) < NUM_VALUES for v in values)
    asked = re.findall(r"the key '([a-z]+)' is(\d+)", match["questions"])
    assert len(asked) == len({key for key, _ in asked}) == len(document.questions) == questions
    for (key, answer), question in zip(asked, document.questions, strict=True):
        assert dict(entries)[key] == answer
        assert question.choices == values
        assert question.choices[question.gold] == answer
        assert cut(document, question.answer) == answer
        assert cut(document, question.segment) == f"{key}:{answer}\n"
        assert cut(document, question.value) == answer


def test_the_example_of_the_method() -> None:
    document = kv_document(rng_of(0), 2)
    question = document.questions[0]
    key = cut(document, question.segment).split(":")[0]
    expected = f"The value of the key '{key}' is{question.choices[question.gold]}"
    assert document.text.startswith("Memorize the following dictionary:\n")
    assert document.text.split("\n")[-1] == expected


def test_the_same_seed_gives_the_same_document_and_another_one_another() -> None:
    one, again, other = (kv_document(rng_of("seed", s), 6) for s in (1, 1, 2))
    assert one == again
    assert one.text != other.text


def test_any_line_may_be_asked_for() -> None:
    rng = rng_of("gold")
    asked = [kv_document(rng, 4).questions[0].gold for _ in range(200)]
    assert all(30 <= asked.count(line) <= 70 for line in range(4))


def test_keys_of_the_splits_are_disjoint() -> None:
    for split, other in (("train", "eval"), ("eval", "train")):
        document = kv_document(rng_of("split"), 50, split=split)
        keys = set(re.findall(r"^([a-z]+):", document.text, re.M))
        assert len(keys) == 50
        assert keys <= set(key_words(split))
        assert not keys & set(key_words(other))


@pytest.mark.parametrize("pairs", [-1, 0, 1, NUM_VALUES + 1, 10_000])
def test_an_impossible_number_of_pairs_is_refused(pairs: int) -> None:
    with pytest.raises(ProbeError) as caught:
        kv_document(rng_of(0), pairs)
    assert caught.value.field == "pairs"
    assert str(NUM_VALUES) in caught.value.hint


@pytest.mark.parametrize("questions", [-1, 0, 5])
def test_an_impossible_number_of_questions_is_refused(questions: int) -> None:
    with pytest.raises(ProbeError) as caught:
        kv_document(rng_of(0), 4, questions)
    assert caught.value.field == "questions"


def test_both_splits_reach_the_largest_dictionary() -> None:
    for split in ("train", "eval"):
        assert len(kv_document(rng_of(0), NUM_VALUES, split=split).questions[0].choices) == NUM_VALUES


def test_every_value_is_one_token_wherever_it_stands() -> None:
    tokenizer = pico_tokenizer()
    for value in range(NUM_VALUES):
        (alone,) = tokenizer(str(value))["input_ids"]
        for before, after in (("nare:", "\n"), ("' is", ""), ("' is", "\n")):
            ids = tokenizer(f"{before}{value}{after}")["input_ids"]
            assert alone in ids
            assert tokenizer.decode(ids[: ids.index(alone)]) == before


def test_every_key_spans_two_tokens_or_more_and_the_same_ones_wherever_it_stands() -> None:
    tokenizer = pico_tokenizer()
    keys = [*key_words("train"), *key_words("eval")]
    alone = tokenizer(keys)["input_ids"]
    listed = tokenizer([f"\n{key}:" for key in keys])["input_ids"]
    asked = tokenizer([f"key '{key}' is" for key in keys])["input_ids"]
    for ids, line, question in zip(alone, listed, asked, strict=True):
        assert len(ids) >= 2
        assert line[1:-1] == ids
        assert any(question[i : i + len(ids)] == ids for i in range(len(question)))
