"""Checks and values that several probes with dictionaries share.

A question is scored by the first tokens of its choices (`data.encoding.encode`), so values must differ in their first
token, for any tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from surgery.errors import ProbeError
from surgery.probes.documents import Split, draw

NUM_LEADS = 90


def leads(rng: Random, count: int) -> tuple[str, ...]:
    """Draw the first two digits of `count` values, all different. Up to 10 values differ in the first digit.

    So first tokens differ for up to 10 values with any tokenizer, and for up to 90 if a token has two digits. `encode`
    raises an error for a tokenizer that starts every text with a token of its own (SentencePiece's space).

    Raises:
        ProbeError: more than 90 values.
    """
    if count <= 10:
        return tuple(f"{first}{rng.randrange(10)}" for first in rng.sample(range(10), count))
    check_pairs(count, NUM_LEADS, "Values begin with distinct integers 10-99")
    return tuple(str(lead) for lead in rng.sample(range(10, 10 + NUM_LEADS), count))


def different(count: int, split: Split, make: Callable[[], str]) -> tuple[str, ...]:
    """Generate `count` different texts of one split.

    Raises:
        ProbeError: `make` has too few different texts.
    """
    texts: dict[str, None] = {}
    for _ in range(100 * count):
        texts[draw(split, make)] = None
        if len(texts) == count:
            return tuple(texts)
    raise ProbeError("pairs", count, f"The generator has too few different texts for the {split} split. Use fewer.")


def check_pairs(pairs: int, most: int, why: str) -> None:
    """Raise ProbeError unless there are 2 to `most` pairs. `why` is the reason for the limit."""
    if not 2 <= pairs <= most:
        raise ProbeError("pairs", pairs, f"{why}. Use 2 to {most}.")


def check_questions(questions: int, most: int) -> None:
    """Raise ProbeError unless there are 1 to `most` questions, each about a different pair."""
    if not 1 <= questions <= most:
        raise ProbeError("questions", questions, f"Each question is about a different pair. Use 1 to {most}.")
