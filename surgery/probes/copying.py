"""Copying: a random string, and the same string again.

    Repeat the following text:
    balo17mikufe3
    Again:balo17mikufe3

Syllables and integers 0-99 follow one another at random, so only the first copy predicts the second (the task of
Jelassi et al., arXiv 2402.01032).
"""

from __future__ import annotations

from random import Random

from surgery.probes.documents import Document, Question, Split, Writer, draw
from surgery.probes.registry import Options, Probe, register_probe
from surgery.probes.words import SYLLABLES

HEADER = "Repeat the following text:\n"
AGAIN = "Again:"


@register_probe("copying")
class Copying(Probe):
    """Copying, with `pairs` pieces in the string. The second copy is the answer; there are no choices."""

    scoring = "generation"
    pairs = (2, 100)

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        def piece() -> str:
            return rng.choice(SYLLABLES) if rng.random() < 0.5 else str(rng.randrange(100))

        passage = draw(split, lambda: "".join(piece() for _ in range(options.pairs)))
        writer = Writer()
        writer.add(HEADER)
        first = writer.add(passage)
        writer.add("\n" + AGAIN)
        answer = writer.add(passage)
        return Document("copying", writer.text, (Question(answer, (), 0, segment=first, value=first),))
