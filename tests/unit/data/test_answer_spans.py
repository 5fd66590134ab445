"""Where an answer occurs in its prompt: once, several times, or only inside other words and numbers."""

from __future__ import annotations

from surgery.data.answer_spans import find_answer


def test_one_place_is_found() -> None:
    for prompt, answer in (
        ("fox:41\nowl:42\nowl?", "42"),
        ("42", "42"),
        ("agent 42.", "42"),
        ("agent 42, then", "42"),
        ("is it (42)?", "42"),
        ("[17,42,99]", "42"),
        ("fox-42", "42"),
        ("10-42", "42"),
        ("- 42", "42"),
        ("it is -42", "-42"),
        ("5,042 and 042", "042"),
        ("under the sun", "the"),
        ("others, the other", "other"),
        ("snake_case and snake", "snake"),
        ("Anna's ticket", "Anna"),
        ("the old baker came", " old baker\n"),
        ("cafe\u0301 and cafe", "cafe"),
        ("C++ and D", "C++"),
        ("今天北京下雨", "北京"),
        ("กรุงเทพมหานคร", "เทพ"),
    ):
        outcome, span = find_answer(prompt, answer)
        assert outcome == "found" and span is not None, prompt
        assert prompt[slice(*span)] == answer.strip(), prompt


def test_a_place_inside_a_longer_number_is_not_taken() -> None:
    for number in ("1042", "A42", "42,000", "42.5", "10.42", "-42", "4242"):
        prompt = f"{number} and 42"
        assert find_answer(prompt, "42") == ("found", (len(prompt) - 2, len(prompt))), prompt


def test_no_place_and_several_have_their_names() -> None:
    missing = ("", "nothing", "1042", "420", "42nd", "x42", "42.5", "42,000", "-42", "\u221242", "4 2")
    others = (("Owl", "owl"), ("old  baker", "old baker"), ("anything", "  "))
    several = (("42 and 42", "42"), ("a a a", "a a"), ("42\n42", " 42\n"), ("北京北京", "北京"))
    for outcome, cases in (("missing", (*((p, "42") for p in missing), *others)), ("ambiguous", several)):
        for prompt, answer in cases:
            assert find_answer(prompt, answer) == (outcome, None), prompt
