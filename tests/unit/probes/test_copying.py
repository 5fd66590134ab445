"""The same string twice, and nothing but the first copy that says what comes next."""

from __future__ import annotations

from random import Random

import pytest

from surgery.data.encoding import encode
from surgery.errors import ProbeError
from surgery.probes.copying import copying_document
from surgery.probes.documents import split_of
from tests.support.pico import pico_tokenizer


@pytest.mark.parametrize("pieces", [2, 5, 40])
def test_the_answer_is_the_passage_itself(pieces: int) -> None:
    document = copying_document(Random(pieces), pieces)
    (question,) = document.questions
    passage = document.text[slice(*question.value)]
    assert document.text[slice(*question.answer)] == passage
    assert document.text.count(passage) == 2
    assert question.answer[1] == len(document.text)


@pytest.mark.parametrize("seed", range(5))
def test_both_copies_have_the_same_tokens(seed: int) -> None:
    document = copying_document(Random(seed), 12)
    batch = encode([document], pico_tokenizer())
    copied = batch.input_ids[batch.answers]
    first = int(batch.answer_token[0, 0])
    assert copied.tolist() == batch.input_ids[0, first : first + len(copied)].tolist()


def test_splits_are_disjoint() -> None:
    for split in ("train", "eval"):
        for seed in range(20):
            document = copying_document(Random(seed), 6, split)
            assert split_of(document.text[slice(*document.questions[0].value)]) == split


def test_one_piece_is_refused() -> None:
    with pytest.raises(ProbeError, match="pieces"):
        copying_document(Random(0), 1)
