"""Word lists: distinct, seeded, their splits apart."""

from __future__ import annotations

from surgery.probes.words import (
    ANSWERS,
    PLACES,
    SIZES,
    THINGS,
    TIMES,
    VERBS,
    WEATHER,
    key_words,
)

TEMPLATE_WORDS = [w for words in (*ANSWERS.values(), PLACES, SIZES, THINGS, TIMES, VERBS, WEATHER) for w in words]


def test_keys_of_the_splits_are_disjoint_and_many() -> None:
    train, evaluation = key_words("train"), key_words("eval")
    assert not set(train) & set(evaluation)
    assert len({*train, *evaluation}) == len(train) + len(evaluation)
    assert len(train) >= 1000
    assert 0.1 < len(evaluation) / (len(train) + len(evaluation)) < 0.3


def test_no_key_occurs_in_a_word_of_the_templates() -> None:
    keys = [*key_words("train"), *key_words("eval")]
    assert [(key, word) for word in TEMPLATE_WORDS for key in keys if key in word] == []
