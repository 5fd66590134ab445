"""Find the answer in a prompt, for data without marked spans (`answer_span: auto`)."""

from __future__ import annotations

import re
import unicodedata

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
_SEPARATED = {".": re.compile(r"\.\d"), ",": re.compile(r",\d{3}(?!\d)")}  # inside a number: 1.5 and 1,000


def find_answer(prompt: str, answer: str) -> tuple[str, Span | None]:
    """Find the one place of an answer in a prompt.

    A place inside a longer number or word does not count: 42 is not in 1042, 42.5, 42,000, -42 or A42. Whitespace at
    the ends of the answer is ignored. Upper and lower case differ.

    Returns:
        - `found` and the characters [start, end), if the answer occurs once.
        - `ambiguous` and None, if it occurs several times.
        - `missing` and None, if it does not occur.
    """
    answer = answer.strip()
    places: list[Span] = []
    start = prompt.find(answer) if answer else -1
    while start >= 0 and len(places) < 2:
        end = start + len(answer)
        if not _begins_earlier(prompt, start) and not _goes_on(prompt, end):
            places.append((start, end))
        start = prompt.find(answer, start + 1)
    if not places:
        return "missing", None
    return ("found", places[0]) if len(places) == 1 else ("ambiguous", None)


def _begins_earlier(prompt: str, start: int) -> bool:
    """Whether the character at `start` continues a number or word."""
    before, first = prompt[max(0, start - 2) : start], prompt[start]
    beyond, left = before[:-1], before[-1:]
    if first.isdigit() and left in _SEPARATED:
        return beyond.isdigit() and _SEPARATED[left].match(prompt, start - 1) is not None
    if first.isdigit() and left in ("-", "+", "\u2212"):
        return not _in_word(beyond)
    return _is_joined(left, first)


def _goes_on(prompt: str, end: int) -> bool:
    """Whether the number or word before `end` continues after it."""
    last, right = prompt[end - 1], prompt[end : end + 1]
    if last.isdigit() and right in _SEPARATED:
        return _SEPARATED[right].match(prompt, end) is not None
    return _is_joined(last, right)


def _is_joined(left: str, right: str) -> bool:
    """Whether two neighbouring characters belong to the same word or number."""
    if right and unicodedata.category(right)[0] == "M":  # an accent on the letter before it
        return True
    return all(_in_word(c) and not any(a <= ord(c) <= b for a, b in _WITHOUT_SPACES) for c in (left, right))


def _in_word(char: str) -> bool:
    return bool(char) and (char == "_" or unicodedata.category(char)[0] in "LNM")
