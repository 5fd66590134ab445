"""Copying: a random string, and the same string again.

    Repeat the following text:
    balo17mikufe3
    Again:balo17mikufe3

Syllables and integers 0-99 follow one another without a pattern, so that nothing but the first copy says what comes
next (the task of Jelassi et al., arXiv 2402.01032). Owns: that text. Must never know: models.
"""

from __future__ import annotations

from random import Random

from surgery.errors import ProbeError
from surgery.probes.documents import Document, Question, Split, Writer, draw
from surgery.probes.registry import Options, Probe, register_probe
from surgery.probes.words import SYLLABLES

HEADER = "Repeat the following text:\n"
AGAIN = "Again:"
_WORDS = 0.5  # the share of pieces that are syllables; the others are integers


def copying_document(rng: Random, pieces: int, split: Split = "train") -> Document:
    """A string of `pieces` syllables and integers, twice; the second is the answer, and there are no choices.

    Raises:
        ProbeError: fewer than two pieces.
    """
    if pieces < 2:
        raise ProbeError("pieces", pieces, "Copy 2 or more.")

    def piece() -> str:
        return rng.choice(SYLLABLES) if rng.random() < _WORDS else str(rng.randrange(100))

    passage = draw(split, lambda: "".join(piece() for _ in range(pieces)))
    writer = Writer()
    writer.add(HEADER)
    first = writer.add(passage)
    writer.add("\n" + AGAIN)
    return Document("copying", writer.text + passage, (_question(first, len(writer.text), len(passage)),))


def _question(first: tuple[int, int], start: int, length: int) -> Question:
    return Question((start, start + length), (), 0, segment=first, value=first)


@register_probe("copying")
class Copying(Probe):
    """Copying: `copying_document`, with `pairs` pieces."""

    scoring = "generation"
    pairs = (2, 100)

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        """A string, twice."""
        return copying_document(rng, options.pairs, split)
