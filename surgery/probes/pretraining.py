"""Two auxiliary tasks for pretraining, on the dictionaries of `kv_retrieval`. Neither measures retrieval.

Key echo repeats every key after its value. The repeated keys are the answers. To predict one, the model must carry the
key across the words in between to the value's token: the first half of retrieval, which Gather heads do (arXiv
2504.18574). Training on far pairs alone has no such signal until keys can be read as well:

    Memorize the following dictionary:
    key small river:value key
    ...

The repeated dictionary lists every pair twice, the second time in another order. The values of the second listing are
the answers, so every line is a question: it teaches a model to read what it has gathered:

    Memorize the following dictionary:
    key small river:value
    ...
    key under the old bridge:value
    ...
"""

from __future__ import annotations

from random import Random

from surgery.probes.documents import Document, Question, Split, Writer
from surgery.probes.kv_retrieval import HEADER, NUM_VALUES, draw_values, write_lines
from surgery.probes.pairs import ask, fillers
from surgery.probes.registry import Options, Probe, register_probe
from surgery.probes.words import key_words


@register_probe("key_echo")
class KeyEcho(Probe):
    """Key echo. An evaluation scores the last line."""

    unit = "pairs"
    scoring = "generation"
    pairs = (2, NUM_VALUES)
    options = ("filler", "value_digits")
    newline_ends_answer = True
    lm_eval_group = None

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        keys = rng.sample(key_words(split), options.pairs)
        values = draw_values(rng, options.pairs, options.value_digits)
        writer = Writer()
        writer.add(HEADER)
        questions = []
        for key, words, value in zip(keys, fillers(rng, options.pairs, options.filler), values, strict=True):
            writer.add(f"{key}{words}:{value}")
            questions.append(Question(writer.add(f" {key}")))
            writer.add("\n")
        return Document("key_echo", writer.text, tuple(questions))


@register_probe("kv_repeated")
class KvRepeated(Probe):
    """Repeated dictionary. An evaluation scores the last line."""

    label = "repeated dictionary"
    unit = "pairs"
    pairs = (2, NUM_VALUES)
    options = ("filler", "value_digits")
    gold_position = newline_ends_answer = True
    lm_eval_group = None

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        """Generate a dictionary that is listed twice. The words between are drawn for each line of both listings."""
        pairs = options.pairs
        keys = rng.sample(key_words(split), pairs)
        values = draw_values(rng, pairs, options.value_digits)
        again = rng.sample(range(pairs), pairs)
        words = fillers(rng, 2 * pairs, options.filler)
        writer = Writer()
        writer.add(HEADER)
        spans = write_lines(writer, keys, words[:pairs], values)
        questions = []
        for index, between in zip(again, words[pairs:], strict=True):
            questions.append(ask(writer, f"{keys[index]}{between}:", values, index, spans))
            writer.add("\n")
        return Document("kv_repeated", writer.text, tuple(questions))
