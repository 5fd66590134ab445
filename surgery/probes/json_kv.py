"""JSON key-value retrieval in the text of "Lost in the Middle" (Liu et al., arXiv 2307.03172).

    Extract the value corresponding to the specified key in the JSON object below.

    JSON data:
    {"key": "value",
     ...
     "key": "value"}

    Key: "key"
    Corresponding value: "value"

Keys and values are hexadecimal strings in the groups of a UUID, without its version bits. The quote before the answer
belongs to the prompt, so that choices differ in the first character of the answer. For the same reason values start
with two chosen digits and a letter (`pairs.leads`).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from surgery.errors import ProbeError
from surgery.probes.documents import Document, Question, Split, Writer
from surgery.probes.pairs import NUM_LEADS, Range, check_pairs, check_questions, different, fillers, leads, numbers
from surgery.probes.registry import Options, Probe, register_probe

HEADER = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
UUID = (8, 4, 4, 4, 12)
_MIN_DIGITS = 4  # 65,536 strings: many more than keys, in each split


def json_kv_document(
    rng: Random,
    pairs: int,
    questions: int = 1,
    split: Split = "train",
    groups: Sequence[int] = UUID,
    filler: Range | None = None,
    value_digits: Range | None = None,
) -> Document:
    """Generate a JSON object and questions about different keys of it.

    Args:
        rng: source of randomness.
        pairs: number of entries.
        questions: number of questions.
        split: the splits have different keys.
        groups: number of digits in each group of a key and of a value. `(4,)` suits small models, whose tokenizers have
            one token per digit or two.
        filler: smallest and largest number of words after a key, inside its string. None for no words. Questions
            have the key alone.
        value_digits: smallest and largest number of digits of the values, which are then decimal numbers of one
            length. None for values as long as keys.

    Raises:
        ProbeError: fewer than 2 or more than 90 pairs, more questions than pairs, or too few digits.
    """
    check_pairs(pairs, NUM_LEADS, "Values begin with different digits")
    check_questions(questions, pairs)
    if sum(groups) < _MIN_DIGITS or min(groups) < 1 or groups[0] < 3:
        hint = f"Use {_MIN_DIGITS} digits or more, 3 or more of them in the first group."
        raise ProbeError("groups", tuple(groups), hint)
    keys = different(pairs, split, lambda: _digits(rng, groups))
    if value_digits is None:
        values = tuple(_digits(rng, groups, lead + rng.choice("abcdef")) for lead in leads(rng, pairs))
    else:
        values = numbers(rng, pairs, value_digits)
    queried = rng.sample(range(pairs), questions)
    writer = Writer()
    writer.add(HEADER)
    spans = []
    for number, (key, words, value) in enumerate(zip(keys, fillers(rng, pairs, filler), values, strict=True)):
        start, _ = writer.add(("{" if number == 0 else " ") + f'"{key}{words}": "')
        value_span = writer.add(value)
        _, end = writer.add('"}\n' if number == pairs - 1 else '",\n')
        spans.append(((start, end), value_span))
    drawn_questions = []
    for index in queried:
        writer.add(f'\nKey: "{keys[index]}"\nCorresponding value: "')
        answer = writer.add(values[index])
        writer.add('"\n')
        segment, value_span = spans[index]
        drawn_questions.append(Question(answer, values, index, segment=segment, value=value_span))
    return Document("json_kv", writer.text, tuple(drawn_questions))


def _digits(rng: Random, groups: Sequence[int], start: str = "") -> str:
    """Random hexadecimal digits in groups, beginning with `start`."""
    count = sum(groups) - len(start)
    digits = iter(start + "".join(rng.choice("0123456789abcdef") for _ in range(count)))
    return "-".join("".join(next(digits) for _ in range(size)) for size in groups)


@register_probe("json_kv")
class JsonKv(Probe):
    """JSON key-value retrieval: `json_kv_document`."""

    pairs = (2, NUM_LEADS)
    options = ("questions", "groups", "filler", "value_digits")
    gold_position = True
    lm_eval_sizes = (8, 16)

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        """Generate a JSON object and questions about it."""
        groups = options.groups or UUID
        return json_kv_document(
            rng, options.pairs, options.questions, split, groups, options.filler, options.value_digits
        )
