"""Any text in one line: nothing that moves the cursor, and no longer than it may be."""

from __future__ import annotations

import unicodedata

import pytest

from surgery.report.text import cut_middle, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text", "plain text"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\\n", "\\\\n"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("\u202eevil\u2066", "\\u202eevil\\u2066"),
        ("\u2028\u00a0\u200b", "\\u2028\\xa0\\u200b"),
        ("é 漢 🙂", "é 漢 🙂"),
        ("", ""),
    ],
)
def test_what_does_not_print_is_an_escape(text: str, shown: str) -> None:
    assert visible(text, 60) == shown


def test_no_control_character_is_left() -> None:
    every = "".join(map(chr, range(0x3000)))
    shown = visible(every, 100_000)
    assert all(char == " " or unicodedata.category(char)[0] not in "CZ" for char in shown)


@pytest.mark.parametrize("limit", [7, 8, 20, 61])
@pytest.mark.parametrize("text", ["x" * 1000, "\n" * 1000, "ab\x1b" * 400, "漢" * 62, "y" * 61 + "\n"])
def test_a_long_text_is_cut_in_the_middle(text: str, limit: int) -> None:
    shown = visible(text, limit)
    assert len(shown) <= limit and shown.count(" ... ") == 1
    head, tail = shown.split(" ... ")
    assert visible(text, 10**6).startswith(head) and visible(text, 10**6).endswith(tail)
    assert not any(part.endswith("\\") and not part.endswith("\\\\") for part in (head, tail)), "no half of an escape"


def test_a_text_of_just_the_limit_is_whole() -> None:
    assert visible("x" * 20, 20) == "x" * 20 and visible("\n" * 10, 20) == "\\n" * 10
    assert cut_middle("x" * 20, 20) == "x" * 20


def test_both_ends_stay() -> None:
    text = "start " + "x" * 100 + " end"
    assert cut_middle(text, 21) == "start xx ... xxxx end" and len(cut_middle(text, 21)) == 21
    assert visible(text, 21) == cut_middle(text, 21)
