"""Multi-hop: the answer is what following the lines gives, and no line tells it alone."""

from __future__ import annotations

import pytest

from surgery.data.encoding import encode
from surgery.errors import ProbeError
from surgery.probes.documents import Split, rng_of
from surgery.probes.hops import hop_document
from surgery.probes.words import key_words
from tests.support.pico import pico_tokenizer
from tests.support.samples import cut


@pytest.mark.parametrize(("pairs", "hops"), [(4, 2), (9, 2), (12, 3), (64, 2), (41, 5)])
def test_following_the_lines_gives_the_answer(pairs: int, hops: int) -> None:
    document = hop_document(rng_of("hops", pairs), pairs, hops, "eval")
    header, *lines, asked = document.text.split("\n")
    table = dict(line.split(":") for line in lines)
    (question,) = document.questions
    key, steps = asked.split("'")[1], 0
    while key in table:
        key, before, steps = table[key], key, steps + 1
    assert (key, steps) == (cut(document, question.answer), hops) and asked.endswith(f"one finds{key}")
    assert cut(document, question.segment) == f"{before}:{key}\n" and cut(document, question.value) == key
    assert question.choices[question.gold] == key and len(table) == pairs
    assert sorted(question.choices) == sorted(value for value in table.values() if value.isdigit())
    assert set(table) <= set(key_words("eval")) and header == "Memorize the following dictionary:"


def test_lines_are_in_any_order_and_any_chain_is_asked_for() -> None:
    documents = [hop_document(rng_of("order", i), 8) for i in range(100)]
    places = [d.text[: d.questions[0].segment[0]].count("\n") - 1 for d in documents if d.questions[0].segment]
    assert set(places) == set(range(8))
    assert {d.questions[0].gold for d in documents} == set(range(4))
    assert documents[0] == hop_document(rng_of("order", 0), 8)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_keys_are_of_the_split(split: Split) -> None:
    for i in range(20):
        _, *lines, _ = hop_document(rng_of("split", i), 8, split=split).text.split("\n")
        assert {line.split(":")[0] for line in lines} <= set(key_words(split))
    assert not set(key_words("train")) & set(key_words("eval"))


def test_positions_in_tokens() -> None:
    batch = encode([hop_document(rng_of(i), 6) for i in range(5)], pico_tokenizer())
    rows = range(5)
    assert batch.input_ids[rows, batch.answer_token[:, 0]].tolist() == batch.target[:, 0].tolist()


@pytest.mark.parametrize(
    ("pairs", "hops", "field"), [(8, 1, "hops"), (3, 2, "pairs"), (5, 3, "pairs"), (500, 2, "pairs")]
)
def test_what_cannot_be_made_is_refused(pairs: int, hops: int, field: str) -> None:
    with pytest.raises(ProbeError) as caught:
        hop_document(rng_of(0), pairs, hops)
    assert caught.value.field == field
