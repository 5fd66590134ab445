"""Values that one token tells apart, and the counts that every dictionary refuses."""

from __future__ import annotations

import pytest

from surgery.errors import ProbeError
from surgery.probes.documents import rng_of, split_of
from surgery.probes.pairs import NUM_LEADS, check_pairs, different, leads
from tests.support.cases import each


@each("count", [2, 10, 11, NUM_LEADS])
def test_leads_are_two_digits_and_differ(count: int) -> None:
    for seed in range(20):
        found = leads(rng_of("leads", seed), count)
        assert len(found) == len(set(found)) == count
        assert all(len(lead) == 2 and lead.isdecimal() for lead in found)


@each("count", range(2, 11))
def test_up_to_ten_leads_differ_in_the_first_digit(count: int) -> None:
    for seed in range(20):
        assert len({lead[0] for lead in leads(rng_of("first", seed), count)}) == count


def test_more_leads_than_there_are_are_refused() -> None:
    with pytest.raises(ProbeError) as caught:
        leads(rng_of(0), NUM_LEADS + 1)
    assert caught.value.field == "pairs"
    assert str(NUM_LEADS) in caught.value.hint


def test_different_texts_are_of_one_split() -> None:
    rng = rng_of("different")
    found = different(30, "eval", lambda: str(rng.randrange(1000)))
    assert len(set(found)) == 30
    assert {split_of(text) for text in found} == {"eval"}


def test_too_few_different_texts_are_an_error_and_not_a_loop() -> None:
    rng = rng_of("few")
    with pytest.raises(ProbeError, match="too few different texts"):
        different(30, "train", lambda: str(rng.randrange(20)))


@each("pairs", [-1, 0, 1, 8, 10_000])
def test_pairs_outside_the_range_are_refused(pairs: int) -> None:
    with pytest.raises(ProbeError, match="Use 2 to 7"):
        check_pairs(pairs, 7, "Why")
