"""What the dictionaries of the transfer tasks share. Owns: their counts, and values that one token tells apart.

Must never know: texts, tokenizers, models. A question is scored by the first tokens of its choices
(`documents.encode`), so values have to differ there, however many characters a token holds.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from surgery.errors import ProbeError
from surgery.probes.documents import Split, draw

NUM_LEADS = 90


def leads(rng: Random, count: int) -> tuple[str, ...]:
    """How `count` values begin: two digits each, all different; up to 10 values, different in the first digit.

    So first tokens differ for up to 10 values whatever a tokenizer merges, and for up to 90 where one token takes two
    digits. One that puts a token of its own before every text (SentencePiece's space) is refused by `encode`.

    Raises:
        ProbeError: more than 90 values.
    """
    if count <= 10:
        return tuple(f"{first}{rng.randrange(10)}" for first in rng.sample(range(10), count))
    check_pairs(count, NUM_LEADS, "Values begin with distinct integers 10-99")
    return tuple(str(lead) for lead in rng.sample(range(10, 10 + NUM_LEADS), count))


def different(count: int, split: Split, make: Callable[[], str]) -> tuple[str, ...]:
    """`count` different texts of one split. Raises ProbeError where `make` makes too few."""
    found: dict[str, None] = {}
    for _ in range(100 * count):
        found[draw(split, make)] = None
        if len(found) == count:
            return tuple(found)
    raise ProbeError("pairs", count, f"This generator makes too few different texts for the {split} split.")


def check_pairs(pairs: int, most: int, why: str) -> None:
    """Raises ProbeError unless there are 2 to `most` pairs; `why` says what sets the limit."""
    if not 2 <= pairs <= most:
        raise ProbeError("pairs", pairs, f"{why}: choose 2 to {most}.")


def check_questions(questions: int, most: int) -> None:
    """Raises ProbeError unless there are 1 to `most` questions, each about a pair of its own."""
    if not 1 <= questions <= most:
        raise ProbeError("questions", questions, f"Each asks for a pair of its own: choose 1 to {most}.")
