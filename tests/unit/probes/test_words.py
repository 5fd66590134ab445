"""Word lists: distinct, seeded, their splits apart."""

from __future__ import annotations

import re

from surgery.probes.words import (
    ANSWERS,
    PLACES,
    SIZES,
    SYLLABLES,
    THINGS,
    TIMES,
    VERBS,
    WEATHER,
    entity_names,
    key_words,
)

TEMPLATE_WORDS = [w for words in (*ANSWERS.values(), PLACES, SIZES, THINGS, TIMES, VERBS, WEATHER) for w in words]


def test_keys_of_the_splits_are_disjoint_and_many() -> None:
    train, evaluation = key_words("train"), key_words("eval")
    assert not set(train) & set(evaluation)
    assert len({*train, *evaluation}) == len(train) + len(evaluation)
    assert len(train) >= 1000
    assert 0.1 < len(evaluation) / (len(train) + len(evaluation)) < 0.3


def test_keys_are_made_up_of_syllables() -> None:
    syllable = f"(?:{'|'.join(SYLLABLES)})"
    for key in (*key_words("train"), *key_words("eval")):
        assert re.fullmatch(syllable + "{2,}", key), key


def test_no_key_occurs_in_a_word_of_the_templates() -> None:
    keys = [*key_words("train"), *key_words("eval")]
    assert [(key, word) for word in TEMPLATE_WORDS for key in keys if key in word] == []


def test_lists_are_always_the_same_ones() -> None:
    before = key_words("train"), entity_names()
    key_words.cache_clear()
    entity_names.cache_clear()
    assert (key_words("train"), entity_names()) == before


def test_names_are_invented_distinct_and_capitalised() -> None:
    names = entity_names()
    assert len(set(names)) == len(names) >= 75
    assert all(n.isalpha() and n.isascii() and n == n.capitalize() for n in names)
    assert not {n.lower() for n in names} & set(TEMPLATE_WORDS)


def test_answers_are_distinct_single_words() -> None:
    for options in ANSWERS.values():
        assert len(set(options)) == len(options) >= 4
        assert all(o.isalpha() and o.islower() for o in options)
