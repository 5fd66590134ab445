"""Repeated dictionary: every pair is listed twice, the second time in another order.

    Memorize the following dictionary:
    key small river:value
    ...
    key under the old bridge:value
    ...

An auxiliary task for pretraining. The values of the second listing are the answers, so every line is a question. It
teaches a model to read what it has gathered: paper/LOG.md has a base that stayed at chance on the questions of
`kv_retrieval` for 1,000 steps and learned them within 250 steps with this task.
"""

from __future__ import annotations

from random import Random

from surgery.probes.documents import Document, Question, Split, Writer
from surgery.probes.kv_retrieval import HEADER, NUM_VALUES, draw_values, write_lines
from surgery.probes.pairs import Range, check_pairs, fillers
from surgery.probes.registry import Options, Probe, register_probe
from surgery.probes.words import key_words


def repeated_document(
    rng: Random,
    pairs: int,
    split: Split = "train",
    filler: Range | None = None,
    value_digits: Range | None = None,
) -> Document:
    """Generate a dictionary and its lines again in another order. Every value of the second listing is an answer.

    Args:
        rng: source of randomness.
        pairs: number of lines of one listing.
        split: the splits have different keys.
        filler: smallest and largest number of words between a key and its value, drawn for each line of both listings.
            None for no words.
        value_digits: smallest and largest number of digits of the values, which all have the same. None for integers
            0-99.

    Raises:
        ProbeError: fewer than 2 or more than 100 pairs.
    """
    check_pairs(pairs, NUM_VALUES, "Documents of kv_retrieval have as many lines")
    keys = rng.sample(key_words(split), pairs)
    values = draw_values(rng, pairs, value_digits)
    again = rng.sample(range(pairs), pairs)
    words = fillers(rng, 2 * pairs, filler)
    writer = Writer()
    writer.add(HEADER)
    spans = write_lines(writer, keys, words[:pairs], values)
    questions = []
    for index, between in zip(again, words[pairs:], strict=True):
        writer.add(f"{keys[index]}{between}:")
        segment, value_span = spans[index]
        answer = writer.add(values[index])
        questions.append(Question(answer, values, index, segment=segment, value=value_span))
        writer.add("\n")
    return Document("kv_repeated", writer.text, tuple(questions))


@register_probe("kv_repeated")
class KvRepeated(Probe):
    """Repeated dictionary: `repeated_document`. An evaluation scores the last line."""

    label = "repeated dictionary"
    unit = "pairs"
    pairs = (2, NUM_VALUES)
    options = ("filler", "value_digits")
    gold_position = newline_ends_answer = True
    lm_eval_group = None  # a task for pretraining

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        """Generate a dictionary that is listed twice."""
        return repeated_document(rng, options.pairs, split, options.filler, options.value_digits)
