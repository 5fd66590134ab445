"""Needle in a haystack in RULER's text (Hsieh et al., arXiv 2404.06654), with a length in tokens.

    Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about
    the numbers afterwards.
    The old baker ... One of the special magic numbers for balo is: 4217365. A small fox ...
    What is the special magic number for balo mentioned in the provided text? The special magic number for balo
    mentioned in the provided text is 4217365

`single` hides one number. `multi_key` hides numbers of several keys and asks for one. `multi_value` hides several
numbers of one key, `multi_query` one number for each of several keys; both ask for all of them ("What are all the
special magic numbers for ..."), in one list with a question for each. Two differences from RULER: the haystack has this
toolkit's plain sentences, and values start with two chosen digits (`pairs.leads`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Literal

from surgery.errors import ProbeError
from surgery.probes.documents import Document, Question, Span, Split, Writer
from surgery.probes.pairs import leads
from surgery.probes.phonebook import spaces
from surgery.probes.registry import Options, Probe, register_probe
from surgery.probes.sentences import sentence
from surgery.probes.words import key_words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Kind = Literal["single", "multi_key", "multi_value", "multi_query"]
HEADER = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n"
)
DIGITS = 7
_DECOYS = 9  # numbers that are not in the text: wrong choices for a single needle


def token_count(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], int]:
    """A function from a text to its number of tokens, with those that the tokenizer adds."""
    return lambda text: len(tokenizer(text)["input_ids"])


def fill_with_sentences(
    rng: Random, length: int, size: Callable[[str], int], split: Split, build: Callable[[Sequence[str]], Document]
) -> list[str]:
    """Draw as many sentences as fit into `length`."""

    def whole(hay: Sequence[str]) -> int:
        document = build(hay)
        return size(document.text[: document.questions[-1].answer[1]])

    room = length - whole([])
    if room < 0:
        raise ProbeError("tokens", length, f"The question and its needles alone need {length - room}. Increase it.")
    hay: list[str] = []
    while room > 0:
        drawn = [sentence(rng, split).text for _ in range(16)]
        hay += drawn
        room -= size(" ".join(drawn)) - size("")  # without BOS
    fitting = bisect_right(range(1, len(hay) + 1), length, key=lambda number: whole(hay[:number]))
    return hay[:fitting]


class Needle(Probe):
    """Needles in a haystack. Without a tokenizer, lengths are in characters.

    A document has at most `tokens` tokens up to the end of the last answer. `depth` is the share of the haystack before
    the needle that the question is about (the first of several); other needles are at random places.
    """

    kind: Kind
    pairs: tuple[int, int] | None = (2, 16)
    options: tuple[str, ...] = ("tokens", "needles")
    gold_position = needs_tokenizer = True
    lm_eval_sizes = (2,)

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        """Generate a haystack with its needles, and the question.

        Raises:
            ProbeError: the text is too short for its needles, or `needles` is outside 2 to 16.
        """
        size: Callable[[str], int] = len if options.tokenizer is None else token_count(options.tokenizer)
        count = 1 if self.kind == "single" else options.needles
        depth = rng.random() if options.depth is None else options.depth
        if self.kind != "single" and not 2 <= count <= 16:
            raise ProbeError("needles", count, "Use 2 to 16.")
        before, first = spaces(options.tokenizer)
        tails = ["".join(rng.choice("0123456789") for _ in range(DIGITS - 2)) for _ in range(count + _DECOYS)]
        starts = leads(rng, count + _DECOYS)
        numbers = [f"{first}{lead}{tail}" for lead, tail in zip(starts, tails, strict=True)]
        keys = rng.sample(key_words(split), 1 if self.kind == "multi_value" else count)
        hidden = [(keys[i % len(keys)], numbers[i]) for i in range(count)]
        queried = hidden[:1] if self.kind in ("single", "multi_key") else hidden
        choices = tuple(numbers if self.kind == "single" else numbers[:count])
        places = [depth, *(rng.random() for _ in hidden[1:])]
        if len(queried) > 1:
            places = [depth, *(depth + (1 - depth) * place for place in sorted(places[1:]))]
        names = list(dict.fromkeys(key for key, _ in queried))
        listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
        noun, verb, every = ("number", "is", "the") if len(queried) == 1 else ("numbers", "are", "all the")

        def build(hay: Sequence[str]) -> Document:
            writer = Writer()
            writer.add(HEADER)
            spans = _haystack(writer, hay, hidden, places, before)
            writer.add(f"\nWhat {verb} {every} special magic {noun} for {listed} mentioned in the provided text? ")
            writer.add(f"The special magic {noun} for {listed} mentioned in the provided text {verb}")
            questions = []
            for place, (key, number) in enumerate(queried):
                writer.add(before if place == 0 else f",{before}")
                answer, (segment, value) = writer.add(number), spans[key, number]
                questions.append(Question(answer, choices, choices.index(number), segment=segment, value=value))
            writer.add(".")
            return Document(self.name, writer.text, tuple(questions))

        return build(fill_with_sentences(rng, options.tokens, size, split, build))


def _haystack(
    writer: Writer, hay: Sequence[str], hidden: Sequence[tuple[str, str]], places: Sequence[float], before: str
) -> dict[tuple[str, str], tuple[Span, Span]]:
    """Write the sentences with the needles between them. Return the spans of each needle and its number."""
    spans, separator = {}, ""
    for line in range(len(hay) + 1):
        for place, (key, number) in zip(places, hidden, strict=True):
            if round(place * len(hay)) == line:
                writer.add(separator)
                opening = f"One of the special magic numbers for {key} is:{before}"
                spans[key, number] = writer.add_segment(opening, number, ".")
                separator = " "
        if line < len(hay):
            writer.add(separator + hay[line])
            separator = " "
    return spans


@register_probe("needle_single")
class SingleNeedle(Needle):
    kind = "single"
    pairs = None
    options = ("tokens",)


@register_probe("needle_multi_key")
class MultiKeyNeedle(Needle):
    kind = "multi_key"


@register_probe("needle_multi_value")
class MultiValueNeedle(Needle):
    kind = "multi_value"


@register_probe("needle_multi_query")
class MultiQueryNeedle(Needle):
    kind = "multi_query"
