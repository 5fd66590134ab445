"""Documents and their questions, with character spans of answers and of the segments that contain them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from surgery.errors import ProbeError

Split = Literal["train", "eval"]
Span = tuple[int, int]


@dataclass(frozen=True)
class Question:
    """One question in a document. Spans are characters [start, end) of the text.

    Attributes:
        answer: the answer, with the space before it if there is one. The token before it is the query.
        choices: texts to rank, each written as it would follow the prompt, including the answer. Empty if the answer
            is generated.
        gold: index of the answer in `choices`.
        segment: the segment of the context that contains the answer (`key:value\\n`); None if nothing is retrieved.
        value: the answer inside that segment. Attention is trained on the segment's last token or on the value's
            tokens (`EncodedBatch`). A value that is its whole segment marks an answer without an end, such as a copied
            passage: a generated text may continue within the last word.
    """

    answer: Span
    choices: tuple[str, ...] = ()
    gold: int = 0
    segment: Span | None = None
    value: Span | None = None


@dataclass(frozen=True)
class Document:
    """A text, the name of its task, and its questions (none for plain text)."""

    task: str
    text: str
    questions: tuple[Question, ...] = ()


def answer_list(document: Document) -> Sequence[Question]:
    """Return the last question, preceded by the questions whose answers form one list with its answer."""
    questions, first = document.questions, len(document.questions) - 1
    while first and not document.text[questions[first - 1].answer[1] : questions[first].answer[0]].strip(" ,"):
        first -= 1
    return questions[first:]


def expected_answers(document: Document) -> tuple[list[str], bool]:
    """Return the texts of the answers, and False if the answer has no end, as for a copied passage."""
    questions = answer_list(document)
    unbounded = questions[0].value is not None and questions[0].value == questions[0].segment
    return [document.text[slice(*q.answer)].strip() for q in questions], not unbounded


def max_answer_tokens(document: Document) -> int:
    """Upper bound on the tokens of the answer, plus one: a token has at least one byte."""
    questions = answer_list(document)
    return len(document.text[questions[0].answer[0] : questions[-1].answer[1]].encode()) + 1


class Writer:
    """Build a text from pieces, with the span of each."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._length = 0

    @property
    def text(self) -> str:
        """All pieces."""
        return "".join(self._pieces)

    def add(self, piece: str) -> Span:
        """Append a piece. Returns its characters [start, end)."""
        start = self._length
        self._pieces.append(piece)
        self._length += len(piece)
        return start, self._length

    def add_segment(self, opening: str, value: str, ending: str) -> tuple[Span, Span]:
        """Append a segment of the context. Returns its characters, and those of the value in it."""
        start, _ = self.add(opening)
        value_span = self.add(value)
        return (start, self.add(ending)[1]), value_span


def split_of(text: str, eval_share: int = 10) -> Split:
    """Assign a text to a split by its hash: one in `eval_share` is `eval`. So splits of any generator are disjoint."""
    return "eval" if int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % eval_share == 0 else "train"


def draw(split: Split, make: Callable[[], str]) -> str:
    """Call `make` until a text belongs to `split`.

    Args:
        make: generates what distinguishes one document from another, as a string.

    Raises:
        ProbeError: none of a thousand texts does, or one is no string.
    """
    for _ in range(1000):
        text = make()
        if not isinstance(text, str):
            raise ProbeError("draw", type(text).__name__, "Its function has to return a string.")
        if split_of(text) == split:
            return text
    raise ProbeError("split", split, "The generator has too few different texts for both splits. Use longer ones.")


def rng_of(*key: object) -> Random:
    """Return a random generator that depends on `key` only: the same in every process and for any order of calls."""
    return Random(":".join(map(str, key)))
