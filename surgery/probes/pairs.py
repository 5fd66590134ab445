"""Values and questions that several probes with dictionaries share.

A question is scored by the first tokens of its choices (`data.encoding.encode`). Values that `leads` begins differ in
their first token, for any tokenizer. `numbers` may share first tokens: they are scored by as many as distinguish them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from surgery.errors import ProbeError
from surgery.probes.documents import Question, Span, Split, Writer, draw
from surgery.probes.words import FILLER

NUM_LEADS = 90
Range = tuple[int, int]  # smallest and largest


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


def num_values(digits: int) -> int:
    """Number of integers with so many digits, without leading zeros: 10, 90, 900, ..."""
    return 10 if digits == 1 else 9 * 10 ** (digits - 1)


def numbers(rng: Random, count: int, digits: Range) -> tuple[str, ...]:
    """Draw `count` different numbers, all with the same number of digits.

    So no number is the beginning of another, and choices of equal length are ranked fairly. The number of digits is
    drawn within `digits`, of those with enough numbers.

    Raises:
        ProbeError: there are not so many numbers, or `digits` is not a range from 1 on.
    """
    low, high = digits
    if not 1 <= low <= high:
        raise ProbeError("value_digits", list(digits), "Use [low, high] with 1 <= low <= high.")
    sizes = [size for size in range(low, high + 1) if num_values(size) >= count]
    if not sizes:
        raise ProbeError("pairs", count, f"Only {num_values(high)} numbers have {high} digits. Increase value_digits.")
    size = rng.choice(sizes)
    first = 0 if size == 1 else 10 ** (size - 1)
    return tuple(str(number) for number in rng.sample(range(first, 10**size), count))


def fillers(rng: Random, count: int, words: Range | None) -> tuple[str, ...]:
    """Draw the words between each of `count` keys and its value, with a space before every word.

    `words` is the smallest and the largest number of words, drawn for each key. None draws nothing.

    Raises:
        ProbeError: `words` is not a range from 0 on.
    """
    if words is None:
        return ("",) * count
    low, high = words
    if not 0 <= low <= high:
        raise ProbeError("filler", list(words), "Use [low, high] with 0 <= low <= high.")
    return tuple("".join(f" {rng.choice(FILLER)}" for _ in range(rng.randint(low, high))) for _ in range(count))


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


def ask(
    writer: Writer, prompt: str, choices: Sequence[str], index: int, spans: Sequence[tuple[Span, Span]]
) -> Question:
    """Write a prompt and choice `index` behind it. `spans` has the segment and the value of every choice."""
    writer.add(prompt)
    segment, value = spans[index]
    return Question(writer.add(choices[index]), tuple(choices), index, segment=segment, value=value)


def check_pairs(pairs: int, most: int, why: str) -> None:
    """Raise ProbeError unless there are 2 to `most` pairs. `why` is the reason for the limit."""
    if not 2 <= pairs <= most:
        raise ProbeError("pairs", pairs, f"{why}. Use 2 to {most}.")
