"""Phonebook: Jelassi et al.'s text with its examples, names of the splits apart, the space on either side."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from surgery.data.encoding import encode
from surgery.errors import ProbeError
from surgery.probes.documents import Document, Split, rng_of, split_of
from surgery.probes.knowledge import facts
from surgery.probes.phonebook import DIGITS, Space, phonebook_document, space_of
from tests.support.pico import pico_tokenizer
from tests.support.samples import cut

LINE = re.compile(rf"([A-Z][a-z]+ [A-Z][a-z]+): (\d{{{DIGITS}}})")


def blocks(document: Document) -> list[list[tuple[str, str]]]:
    """The book, the examples where there are any, and the questions: (name, number) by line."""
    found = []
    for block in document.text.removesuffix("\n").split("\n\n"):
        matches = [LINE.fullmatch(line) for line in block.split("\n")]
        found.append([(m[1], m[2]) for m in matches if m is not None])
        assert len(found[-1]) == len(matches), block
    return found


@pytest.mark.parametrize("space", ["answer", "prompt"])
@pytest.mark.parametrize(("pairs", "questions", "shots"), [(3, 1, 2), (8, 3, 2), (8, 8, 0), (90, 1, 2)])
def test_exact_text(pairs: int, questions: int, shots: int, space: Space) -> None:
    document = phonebook_document(rng_of("text", pairs), pairs, questions, shots=shots, space=space)
    book, *examples, asked = blocks(document)
    numbers = dict(book)
    assert len(book) == len(numbers) == len(set(numbers.values())) == pairs
    assert len(examples) == (shots > 0) and (not examples or len(examples[0]) == shots)
    repeated = [*(examples[0] if examples else []), *asked]
    assert len(dict(repeated)) == shots + questions
    assert set(repeated) <= set(book)
    before = " " if space == "answer" else ""
    for (name, number), question in zip(asked, document.questions, strict=True):
        assert cut(document, question.answer) == cut(document, question.value) == before + number
        assert question.choices == tuple(before + n for n in numbers.values())
        assert cut(document, question.segment) == f"{name}: {number}\n"
        assert question.segment is not None and question.segment[0] == document.text.index(name)


def test_the_same_seed_gives_the_same_document_and_another_one_another() -> None:
    one, again, other = (phonebook_document(rng_of("seed", s), 6) for s in (1, 1, 2))
    assert one == again
    assert one.text != other.text


def test_any_line_may_be_asked_for() -> None:
    rng = rng_of("gold")
    asked = [phonebook_document(rng, 4).questions[0].gold for _ in range(200)]
    assert all(30 <= asked.count(line) <= 70 for line in range(4))


@pytest.mark.parametrize("split", ["train", "eval"])
def test_names_of_the_splits_are_disjoint_and_nobody_has_facts(split: Split) -> None:
    book = blocks(phonebook_document(rng_of("split"), 50, split=split))[0]
    assert {split_of(name) for name, _ in book} == {split}
    assert not {fact.name for fact in facts()} & {word for name, _ in book for word in name.split(" ")}


@pytest.mark.parametrize(
    ("pairs", "questions", "shots", "field"),
    [(1, 1, 0, "pairs"), (91, 1, 2, "pairs"), (4, 1, 4, "shots"), (4, 1, -1, "shots"), (4, 3, 2, "questions")],
)
def test_impossible_counts_are_refused(pairs: int, questions: int, shots: int, field: str) -> None:
    with pytest.raises(ProbeError) as caught:
        phonebook_document(rng_of(0), pairs, questions, shots=shots)
    assert caught.value.field == field


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and a space together with the digit behind it, as GPT-NeoX's has them."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("\u0120", digit) for digit in "0123456789"]
    vocab = {text: i for i, text in enumerate(["<pad>", *symbols, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")


@pytest.mark.parametrize(("make", "expected"), [(pico_tokenizer, "prompt"), (spaced_tokenizer, "answer")])
def test_the_space_stands_where_the_tokenizer_has_it(
    make: Callable[[], PreTrainedTokenizerFast], expected: Space
) -> None:
    tokenizer = make()
    assert space_of(tokenizer) == expected
    document = phonebook_document(rng_of("encode"), 10, space=space_of(tokenizer))
    batch, question = encode([document], tokenizer), document.questions[0]
    choices = batch.choice_ids[0, 0].tolist()
    assert len(set(choices)) == 10
    assert choices[question.gold] == batch.target[0, 0]
    answer = question.choices[question.gold]
    alone = tokenizer(answer)["input_ids"][0]
    for position in (batch.query[0, 0] + 1, batch.answer_token[0, 0]):
        assert batch.input_ids[0, position] == alone


def test_on_the_other_side_it_takes_several_tokens_to_tell() -> None:
    batch = encode([phonebook_document(rng_of(0), 10, space="answer")], pico_tokenizer())
    assert batch.choice_rest.shape[-1] >= 1 and len(set(batch.choice_ids[0, 0].tolist())) < 10
