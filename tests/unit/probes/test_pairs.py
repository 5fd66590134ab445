"""Values that one token tells apart, the counts that every dictionary refuses, and words that are no keys."""

from __future__ import annotations

import pytest

from surgery.errors import ProbeError
from surgery.probes.documents import rng_of
from surgery.probes.pairs import NUM_LEADS, different, leads
from surgery.probes.words import ANSWERS, PLACES, SIZES, THINGS, TIMES, VERBS, WEATHER, key_words
from tests.support.cases import each


@each("count", range(2, 11))
def test_up_to_ten_leads_differ_in_the_first_digit(count: int) -> None:
    for seed in range(20):
        assert len({lead[0] for lead in leads(rng_of("first", seed), count)}) == count


def test_more_leads_than_there_are_are_refused() -> None:
    with pytest.raises(ProbeError) as caught:
        leads(rng_of(0), NUM_LEADS + 1)
    assert caught.value.field == "pairs"
    assert str(NUM_LEADS) in caught.value.hint


def test_too_few_different_texts_are_an_error_and_not_a_loop() -> None:
    rng = rng_of("few")
    with pytest.raises(ProbeError, match="too few different texts"):
        different(30, "train", lambda: str(rng.randrange(20)))


def test_no_key_occurs_in_a_word_of_the_templates() -> None:
    of_templates = [*ANSWERS.values(), PLACES, SIZES, THINGS, TIMES, VERBS, WEATHER]
    keys = [*key_words("train"), *key_words("eval")]
    assert [(key, word) for words in of_templates for word in words for key in keys if key in word] == []
