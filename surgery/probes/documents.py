"""Documents and the questions in them, with character spans of answers and of the segments that hold them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

from surgery.errors import ProbeError

Split = Literal["train", "eval"]
Span = tuple[int, int]


@dataclass(frozen=True)
class Question:
    """One answer in a document, as character spans [start, end) of its text.

    Attributes:
        answer: the answer itself; the token before it is the query.
        choices: texts that compete with the answer, the answer among them.
        gold: index of the answer in `choices`.
        segment: the context segment that holds the answer (`key:value\\n`); None when nothing is to be retrieved.
        value: the answer's own place inside that segment.
    """

    answer: Span
    choices: tuple[str, ...]
    gold: int
    segment: Span | None = None
    value: Span | None = None


@dataclass(frozen=True)
class Document:
    """A text, the task it belongs to, and the questions in it (none for plain text)."""

    task: str
    text: str
    questions: tuple[Question, ...] = ()


class Writer:
    """Appends text and remembers spans, so that no position is ever counted by hand."""

    def __init__(self) -> None:
        self.text = ""

    def add(self, piece: str) -> Span:
        start = len(self.text)
        self.text += piece
        return start, len(self.text)


def split_of(text: str, eval_share: int = 10) -> Split:
    """`eval` for one text in `eval_share`, by its hash: the two splits are disjoint whatever generated them."""
    return "eval" if int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % eval_share == 0 else "train"


def draw(split: Split, make: Callable[[], str]) -> str:
    """Draws texts from `make` until one falls into `split`. Raises ProbeError if a thousand do not."""
    for _ in range(1000):
        text = make()
        if split_of(text) == split:
            return text
    raise ProbeError("split", split, "This generator makes too few different texts for both splits.")


def rng_of(*key: object) -> Random:
    """A generator that depends on `key` alone, whatever process or order it is asked in."""
    return Random(":".join(map(str, key)))
