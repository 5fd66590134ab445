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
from surgery.probes.pairs import NUM_LEADS, check_pairs, check_questions, different, leads
from surgery.probes.registry import Options, Probe, register_probe
from surgery.probes.words import SYLLABLES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DIGITS = 10
SHOTS = 2
Space = Literal["answer", "prompt"]


def phonebook_document(
    rng: Random, pairs: int, questions: int = 1, split: Split = "train", shots: int = SHOTS, space: Space = "answer"
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

    Raises:
        ProbeError: fewer than 2 or more than 90 pairs, or more examples and questions than pairs.
    """
    check_pairs(pairs, NUM_LEADS, "Numbers start with different digits")
    if not 0 <= shots < pairs:
        raise ProbeError("shots", shots, f"Examples and questions need different lines. Use 0 to {pairs - 1}.")
    check_questions(questions, pairs - shots)
    names = different(pairs, split, lambda: f"{_word(rng)} {_word(rng)}")
    before, first = ("", " ") if space == "answer" else (" ", "")
    tails = ["".join(rng.choice("0123456789") for _ in range(DIGITS - 2)) for _ in range(pairs)]
    numbers = tuple(f"{first}{lead}{tail}" for lead, tail in zip(leads(rng, pairs), tails, strict=True))
    writer = Writer()
    spans = [_line(writer, f"{name}:{before}", number) for name, number in zip(names, numbers, strict=True)]
    again = rng.sample(range(pairs), shots + questions)
    if shots:
        writer.add("\n")
    for index in again[:shots]:
        _line(writer, f"{names[index]}:{before}", numbers[index])
    writer.add("\n")
    drawn_questions = []
    for index in again[shots:]:
        _, answer = _line(writer, f"{names[index]}:{before}", numbers[index])
        segment, value = spans[index]
        drawn_questions.append(Question(answer, numbers, index, segment=segment, value=value))
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
    options = ("questions",)
    gold_position = newline_ends_answer = needs_tokenizer = True

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        """Generate a phonebook, examples and questions about other lines."""
        pairs, shots = options.pairs, min(SHOTS, options.pairs - 1)
        space = space_of(options.tokenizer) if options.tokenizer else "answer"
        return phonebook_document(rng, pairs, min(options.questions, pairs - shots), split, shots, space)
