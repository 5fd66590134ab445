"""KV-retrieval in the paper's exact text (arXiv 2504.18574, section 4).

    Memorize the following dictionary:
    key:value
    ...
    The value of the key 'key' is42

The value follows `is` without a space. Keys are distinct words, values distinct integers 0-99. The choices are the
values in the prompt.
"""

from __future__ import annotations

from random import Random

from surgery.errors import ProbeError
from surgery.probes.documents import Document, Question, Split, Writer
from surgery.probes.registry import Options, Probe, register_probe
from surgery.probes.words import key_words

NUM_VALUES = 100
HEADER = "Memorize the following dictionary:\n"


def kv_document(rng: Random, pairs: int, questions: int = 1, split: Split = "train") -> Document:
    """Generate a dictionary and questions about different keys of it.

    Args:
        rng: source of randomness.
        pairs: number of lines.
        questions: number of questions.
        split: the splits have different keys.

    Raises:
        ProbeError: more pairs than distinct values or keys, or more questions than pairs.
    """
    keys_available = key_words(split)
    if not 2 <= pairs <= min(NUM_VALUES, len(keys_available)):
        limit = min(NUM_VALUES, len(keys_available))
        raise ProbeError("pairs", pairs, f"Values are distinct integers 0-{NUM_VALUES - 1}. Use 2 to {limit}.")
    if not 1 <= questions <= pairs:
        raise ProbeError("questions", questions, f"Use 1 to {pairs} questions with {pairs} pairs.")
    keys = rng.sample(keys_available, pairs)
    values = tuple(str(v) for v in rng.sample(range(NUM_VALUES), pairs))
    writer = Writer()
    writer.add(HEADER)
    spans = []
    for key, value in zip(keys, values, strict=True):
        start, _ = writer.add(f"{key}:")
        value_span = writer.add(value)
        _, end = writer.add("\n")
        spans.append(((start, end), value_span))
    drawn_questions = []
    for number, index in enumerate(rng.sample(range(pairs), questions)):
        writer.add(("\n" if number else "") + f"The value of the key '{keys[index]}' is")
        answer = writer.add(values[index])
        segment, value_span = spans[index]
        drawn_questions.append(Question(answer, values, index, segment=segment, value=value_span))
    return Document("kv_retrieval", writer.text, tuple(drawn_questions))


@register_probe("kv_retrieval")
class KvRetrieval(Probe):
    """KV-retrieval: `kv_document`."""

    label = "KV-retrieval"
    unit = "pairs"
    pairs = (2, NUM_VALUES)
    options = ("questions",)
    gold_position = newline_ends_answer = True
    seed_name = "kv"
    lm_eval_sizes = (4, 8, 16, 32, 64)

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        """Generate a dictionary and questions about it."""
        return kv_document(rng, options.pairs, options.questions, split)
