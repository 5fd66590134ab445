"""Phonebook look-up in the text of "Repeat After Me" (Jelassi et al., arXiv 2402.01032).

    Name Surname: 0123456789
    ...

    Name Surname: 0123456789        (two of the lines again, as examples)
    Name Surname: 0123456789

    Name Surname: 0123456789        (the question is another line's name, the answer its number)

Names are invented. Numbers have ten digits. In the paper they start with 6-9; here with two chosen digits, so that they
differ in the first token (`pairs.leads`).
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Literal

from surgery.errors import ProbeError
from surgery.probes.documents import Document, Question, Split, Writer
from surgery.probes.pairs import NUM_LEADS, Range, check_pairs, check_questions, different, fillers, leads, numbers
from surgery.probes.registry import Options, Probe, register_probe
from surgery.probes.words import SYLLABLES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DIGITS = 10
SHOTS = 2
Space = Literal["answer", "prompt"]


def phonebook_document(
    rng: Random,
    pairs: int,
    questions: int = 1,
    split: Split = "train",
    shots: int = SHOTS,
    space: Space = "answer",
    filler: Range | None = None,
    value_digits: Range | None = None,
) -> Document:
    """Generate a phonebook, some of its lines again as examples, and questions about other lines.

    Args:
        rng: source of randomness.
        pairs: number of lines.
        questions: number of questions.
        split: the splits have different names.
        shots: number of examples.
        space: whether the space before a number belongs to the `answer` or to the `prompt`. Depends on the tokenizer;
            see `space_of`.
        filler: smallest and largest number of words between a name and its number. None for no words. The examples
            and questions have the name alone.
        value_digits: smallest and largest number of digits of the numbers, which all have the same. None for ten.

    Raises:
        ProbeError: fewer than 2 or more than 90 pairs, or more examples and questions than pairs.
    """
    check_pairs(pairs, NUM_LEADS, "Numbers start with different digits")
    if not 0 <= shots < pairs:
        raise ProbeError("shots", shots, f"Examples and questions need different lines. Use 0 to {pairs - 1}.")
    check_questions(questions, pairs - shots)
    names = different(pairs, split, lambda: f"{_word(rng)} {_word(rng)}")
    before, first = ("", " ") if space == "answer" else (" ", "")
    if value_digits is None:
        tails = ["".join(rng.choice("0123456789") for _ in range(DIGITS - 2)) for _ in range(pairs)]
        digits = tuple(lead + tail for lead, tail in zip(leads(rng, pairs), tails, strict=True))
    else:
        digits = numbers(rng, pairs, value_digits)
    values = tuple(first + number for number in digits)
    again = rng.sample(range(pairs), shots + questions)
    writer = Writer()
    lines = zip(names, fillers(rng, pairs, filler), values, strict=True)
    spans = [_line(writer, f"{name}{words}:{before}", value) for name, words, value in lines]
    if shots:
        writer.add("\n")
    for index in again[:shots]:
        _line(writer, f"{names[index]}:{before}", values[index])
    writer.add("\n")
    drawn_questions = []
    for index in again[shots:]:
        _, answer = _line(writer, f"{names[index]}:{before}", values[index])
        segment, value = spans[index]
        drawn_questions.append(Question(answer, values, index, segment=segment, value=value))
    return Document("phonebook", writer.text, tuple(drawn_questions))


def space_of(tokenizer: PreTrainedTokenizerBase) -> Space:
    """Return `answer` if a space and a digit are one token (GPT-NeoX), `prompt` if the space is a token of its own."""
    return "answer" if len(tokenizer(" 7", add_special_tokens=False)["input_ids"]) == 1 else "prompt"


def _line(writer: Writer, name: str, number: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Write a line. Returns the spans of the line and of its number."""
    start, _ = writer.add(name)
    number_span = writer.add(number)
    _, end = writer.add("\n")
    return (start, end), number_span


def _word(rng: Random) -> str:
    return "".join(rng.sample(SYLLABLES, 2)).capitalize()


@register_probe("phonebook")
class Phonebook(Probe):
    """Phonebook look-up: `phonebook_document`. A book of two lines has one example."""

    pairs = (2, NUM_LEADS)
    options = ("questions", "filler", "value_digits")
    gold_position = newline_ends_answer = needs_tokenizer = True

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        """Generate a phonebook, examples and questions about other lines."""
        pairs, shots = options.pairs, min(SHOTS, options.pairs - 1)
        space = space_of(options.tokenizer) if options.tokenizer else "answer"
        questions = min(options.questions, pairs - shots)
        return phonebook_document(rng, pairs, questions, split, shots, space, options.filler, options.value_digits)
