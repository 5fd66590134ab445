"""Find the answer in a prompt, for data without marked spans (`answer_span: auto`)."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from surgery.probes.documents import Span

# Scripts without spaces between words, as (first, last) code points: the ends of words are not visible there.
_WITHOUT_SPACES = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3005, 0x30FF),  # Hiragana, Katakana
    (0x3400, 0x9FFF),  # Han
    (0xF900, 0xFAFF),  # Han, compatibility
    (0xFF66, 0xFF9F),  # Katakana, half width
    (0x20000, 0x3FFFF),  # Han, extensions
)
_SIGNS = ("-", "+", "\u2212")
_FRACTION = re.compile(r"\.\d")
_THOUSANDS = re.compile(r",\d{3}(?!\d)")


def find_answer(prompt: str, answer: str) -> tuple[str, Span | None]:
    """Find the one place of an answer in a prompt.

    A place inside a longer number or word does not count: 42 is not in 1042, 42.5, 42,000, -42 or A42. Whitespace at
    the ends of the answer is ignored. Upper and lower case differ.

    Returns:
        - `found` and the characters [start, end), if the answer occurs once.
        - `ambiguous` and None, if it occurs several times.
        - `missing` and None, if it does not occur.
    """
    places = _places(prompt, answer.strip())
    first, second = next(places, None), next(places, None)
    if first is None:
        return "missing", None
    return ("found", first) if second is None else ("ambiguous", None)


def _places(prompt: str, answer: str) -> Iterator[Span]:
    """Yield the places of an answer that are not inside a longer number or word, in order."""
    start = prompt.find(answer) if answer else -1
    while start >= 0:
        end = start + len(answer)
        if not _begins_earlier(prompt, start) and not _goes_on(prompt, end):
            yield start, end
        start = prompt.find(answer, start + 1)


def _begins_earlier(prompt: str, start: int) -> bool:
    """Whether the character at `start` continues a number or word."""
    before, first = prompt[max(0, start - 2) : start], prompt[start]
    beyond, left = before[:-1], before[-1:]
    if first.isdigit() and left in (".", ","):
        separated = (_FRACTION if left == "." else _THOUSANDS).match(prompt, start - 1)
        return beyond.isdigit() and separated is not None
    if first.isdigit() and left in _SIGNS:
        return not _in_word(beyond)
    return _is_joined(left, first)


def _goes_on(prompt: str, end: int) -> bool:
    """Whether the number or word before `end` continues after it."""
    last, right = prompt[end - 1], prompt[end : end + 1]
    if last.isdigit() and right in (".", ","):
        return (_FRACTION if right == "." else _THOUSANDS).match(prompt, end) is not None
    return _is_joined(last, right)


def _is_joined(left: str, right: str) -> bool:
    """Whether two neighbouring characters belong to the same word or number."""
    if right and unicodedata.category(right)[0] == "M":  # an accent on the letter before it
        return True
    return _in_word(left) and _in_word(right) and not _has_no_spaces(left) and not _has_no_spaces(right)


def _in_word(char: str) -> bool:
    return bool(char) and (char == "_" or unicodedata.category(char)[0] in "LNM")


def _has_no_spaces(char: str) -> bool:
    return any(first <= ord(char) <= last for first, last in _WITHOUT_SPACES)
