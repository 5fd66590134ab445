"""KV-retrieval in the paper's exact text (arXiv 2504.18574, section 4).

    Memorize the following dictionary:
    key:value
    ...
    The value of the key 'key' is42

The value follows `is` without a space. Keys are distinct words, values distinct integers 0-99. The choices are the
values in the prompt. Two options change the lines: `filler` puts words between key and value (`key small river:value`),
so that they do not share the window of a short convolution; `value_digits` sets the length of the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from surgery.probes.documents import Document, Span, Split, Writer
from surgery.probes.pairs import Range, ask, fillers, numbers
from surgery.probes.registry import PROBES, Options, Probe, prompts_of, register_probe
from surgery.probes.words import key_words

NUM_VALUES = 100
HEADER = "Memorize the following dictionary:\n"


def kv_document(
    rng: Random,
    pairs: int,
    questions: int = 1,
    split: Split = "train",
    filler: Range | None = None,
    value_digits: Range | None = None,
) -> Document:
    """Generate a dictionary and questions about different keys of it: `KvRetrieval` with these `Options`."""
    options = Options(pairs=pairs, questions=questions, filler=filler, value_digits=value_digits)
    return PROBES["kv_retrieval"].generate(rng, split, options)


def draw_values(rng: Random, pairs: int, value_digits: Range | None) -> tuple[str, ...]:
    """Draw different integers 0-99, or different numbers of one length within `value_digits`."""
    if value_digits is None:
        return tuple(str(v) for v in rng.sample(range(NUM_VALUES), pairs))
    return numbers(rng, pairs, value_digits)


def write_lines(
    writer: Writer, keys: Sequence[str], words: Sequence[str], values: Sequence[str]
) -> list[tuple[Span, Span]]:
    """Write one line for each key, with the words before the colon. Returns the spans of each line and of its value."""
    lines = zip(keys, words, values, strict=True)
    return [writer.add_segment(f"{key}{between}:", value, "\n") for key, between, value in lines]


def kv_prompts(purpose: str, seed: int, count: int, pairs: int, filler: Range | None = None) -> list[Document]:
    """Generate prompts with words of the evaluation split: `prompts_of`, with the sizes of `kv_document`."""
    return prompts_of(PROBES["kv_retrieval"], purpose, seed, count, Options(pairs=pairs, filler=filler))


@register_probe("kv_retrieval")
class KvRetrieval(Probe):
    """KV-retrieval, with `pairs` lines."""

    label = "KV-retrieval"
    unit = "pairs"
    pairs = (2, NUM_VALUES)
    options = ("questions", "filler", "value_digits")
    gold_position = newline_ends_answer = True
    seed_name = "kv"
    lm_eval_sizes = (4, 8, 16, 32, 64)

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        """Generate a dictionary, and questions about different keys of it.

        Fillers are drawn last: a document with them has the keys, values and questions of the one without.
        """
        pairs = options.pairs
        keys = rng.sample(key_words(split), pairs)
        values = draw_values(rng, pairs, options.value_digits)
        queried = rng.sample(range(pairs), options.questions)
        writer = Writer()
        writer.add(HEADER)
        spans = write_lines(writer, keys, fillers(rng, pairs, options.filler), values)
        asked = []
        for number, index in enumerate(queried):
            prompt = ("\n" if number else "") + f"The value of the key '{keys[index]}' is"
            asked.append(ask(writer, prompt, values, index, spans))
        return Document("kv_retrieval", writer.text, tuple(asked))
