"""Key echo: a dictionary whose lines repeat their key after the value.

    Memorize the following dictionary:
    key small river:value key
    ...

An auxiliary task for pretraining. The repeated keys are the answers. To predict one, the model must carry the key
across the words in between to the value's token: the first half of retrieval, which Gather heads do (arXiv
2504.18574). Training on far pairs alone has no such signal until keys can be read as well.
"""

from __future__ import annotations

from random import Random

from surgery.probes.documents import Document, Question, Split, Writer
from surgery.probes.kv_retrieval import HEADER, NUM_VALUES, draw_values
from surgery.probes.pairs import Range, check_pairs, fillers
from surgery.probes.registry import Options, Probe, register_probe
from surgery.probes.words import key_words


def echo_document(
    rng: Random,
    pairs: int,
    split: Split = "train",
    filler: Range | None = None,
    value_digits: Range | None = None,
) -> Document:
    """Generate a dictionary with its keys again after the values. Every second key is an answer; there are no choices.

    Args:
        rng: source of randomness.
        pairs: number of lines.
        split: the splits have different keys.
        filler: smallest and largest number of words between a key and its value. None for no words.
        value_digits: smallest and largest number of digits of the values, which all have the same. None for integers
            0-99.

    Raises:
        ProbeError: fewer than 2 or more than 100 pairs, or more than there are values.
    """
    check_pairs(pairs, NUM_VALUES, "Documents of kv_retrieval have as many lines")
    keys = rng.sample(key_words(split), pairs)
    values = draw_values(rng, pairs, value_digits)
    writer = Writer()
    writer.add(HEADER)
    questions = []
    for key, words, value in zip(keys, fillers(rng, pairs, filler), values, strict=True):
        writer.add(f"{key}{words}:{value}")
        questions.append(Question(writer.add(f" {key}")))
        writer.add("\n")
    return Document("key_echo", writer.text, tuple(questions))


@register_probe("key_echo")
class KeyEcho(Probe):
    """Key echo: `echo_document`. An evaluation scores the last line."""

    unit = "pairs"
    scoring = "generation"
    pairs = (2, NUM_VALUES)
    options = ("filler", "value_digits")
    newline_ends_answer = True
    lm_eval_group = None  # it measures half of retrieval, for pretraining

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        """Generate a dictionary with repeated keys."""
        return echo_document(rng, options.pairs, split, options.filler, options.value_digits)
