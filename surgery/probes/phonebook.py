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
from typing import TYPE_CHECKING

from surgery.probes.documents import Document, Split, Writer
from surgery.probes.pairs import NUM_LEADS, ask, different, fillers, leads, numbers
from surgery.probes.registry import Options, Probe, register_probe
from surgery.probes.words import SYLLABLES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DIGITS = 10
SHOTS = 2


def spaces(tokenizer: PreTrainedTokenizerBase | None) -> tuple[str, str]:
    """Return the space before a number twice: as the prompt has it, and as the answer has it. One of them is empty.

    The answer has it if a space and a digit are one token (GPT-NeoX), and without a tokenizer.
    """
    is_own = tokenizer is not None and len(tokenizer(" 7", add_special_tokens=False)["input_ids"]) > 1
    return (" ", "") if is_own else ("", " ")


@register_probe("phonebook")
class Phonebook(Probe):
    """Phonebook look-up, with `pairs` lines. A book of two lines has one example."""

    pairs = (2, NUM_LEADS)
    options = ("questions", "filler", "value_digits")
    gold_position = newline_ends_answer = needs_tokenizer = True
    shots = SHOTS

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        """Generate a phonebook, some of its lines again as examples, and questions about other lines.

        Examples and questions have the name alone, without the words of `filler`.
        """
        pairs, shots = options.pairs, min(self.shots, options.pairs - 1)
        names = different(pairs, split, lambda: f"{_word(rng)} {_word(rng)}")
        before, first = spaces(options.tokenizer)
        if options.value_digits is None:
            tails = ["".join(rng.choice("0123456789") for _ in range(DIGITS - 2)) for _ in range(pairs)]
            digits = tuple(lead + tail for lead, tail in zip(leads(rng, pairs), tails, strict=True))
        else:
            digits = numbers(rng, pairs, options.value_digits)
        values = tuple(first + number for number in digits)
        again = rng.sample(range(pairs), shots + min(options.questions, pairs - shots))
        writer = Writer()
        lines = zip(names, fillers(rng, pairs, options.filler), values, strict=True)
        spans = [writer.add_segment(f"{name}{words}:{before}", value, "\n") for name, words, value in lines]
        if shots:
            writer.add("\n")
        for index in again[:shots]:
            writer.add(f"{names[index]}:{before}{values[index]}\n")
        writer.add("\n")
        questions = []
        for index in again[shots:]:
            questions.append(ask(writer, f"{names[index]}:{before}", values, index, spans))
            writer.add("\n")
        return Document("phonebook", writer.text, tuple(questions))


def _word(rng: Random) -> str:
    return "".join(rng.sample(SYLLABLES, 2)).capitalize()
