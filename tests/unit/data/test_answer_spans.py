"""Where an answer occurs in its prompt: once, several times, or only inside other words and numbers."""

from __future__ import annotations

import pytest

from surgery.data.answer_spans import find_answer


@pytest.mark.parametrize(
    ("prompt", "answer", "found"),
    [
        ("fox:41\nowl:42\nowl?", "42", "42"),
        ("42", "42", "42"),
        ("agent 42.", "42", "42"),
        ("agent 42, then", "42", "42"),
        ("is it (42)?", "42", "42"),
        ("[17,42,99]", "42", "42"),
        ("fox-42", "42", "42"),
        ("10-42", "42", "42"),
        ("- 42", "42", "42"),
        ("it is -42", "-42", "-42"),
        ("1042 and 42", "42", "42"),
        ("A42 and 42", "42", "42"),
        ("42,000 and 42", "42", "42"),
        ("42.5 and 42", "42", "42"),
        ("10.42 and 42", "42", "42"),
        ("5,042 and 042", "042", "042"),
        ("-42 and 42", "42", "42"),
        ("under the sun", "the", "the"),
        ("others, the other", "other", "other"),
        ("snake_case and snake", "snake", "snake"),
        ("Anna's ticket", "Anna", "Anna"),
        ("the old baker came", " old baker\n", "old baker"),
        ("cafe\u0301 and cafe", "cafe", "cafe"),
        ("C++ and D", "C++", "C++"),
        ("今天北京下雨", "北京", "北京"),
        ("กรุงเทพมหานคร", "เทพ", "เทพ"),
        ("straße und Weg", "Weg", "Weg"),
    ],
)
def test_one_place_is_found(prompt: str, answer: str, found: str) -> None:
    outcome, span = find_answer(prompt, answer)
    assert outcome == "found" and span is not None and prompt[slice(*span)] == found


@pytest.mark.parametrize(
    "prompt",
    ["1042 and 42", "A42 and 42", "42,000 and 42", "42.5 and 42", "10.42 and 42", "-42 and 42", "4242 and 42"],
)
def test_a_place_inside_a_longer_number_is_not_taken(prompt: str) -> None:
    assert find_answer(prompt, "42") == ("found", (len(prompt) - 2, len(prompt)))


@pytest.mark.parametrize(
    "prompt", ["", "nothing", "1042", "420", "42nd", "x42", "42.5", "42,000", "-42", "\u221242", "4 2"]
)
def test_an_answer_that_does_not_occur_is_missing(prompt: str) -> None:
    assert find_answer(prompt, "42") == ("missing", None)


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [("42 and 42", "42"), ("red, red", "red"), ("a a a", "a a"), ("42\n42", " 42\n"), ("北京北京", "北京")],
)
def test_several_places_are_ambiguous(prompt: str, answer: str) -> None:
    """Overlapping ones too."""
    assert find_answer(prompt, answer) == ("ambiguous", None)


def test_case_and_inner_spaces_count() -> None:
    assert find_answer("Owl", "owl")[0] == "missing"
    assert find_answer("old  baker", "old baker")[0] == "missing"
    assert find_answer("anything", "  ")[0] == "missing"
