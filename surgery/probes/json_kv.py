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

from surgery.probes.documents import Document, Split, Writer
from surgery.probes.pairs import NUM_LEADS, ask, different, fillers, leads, numbers
from surgery.probes.registry import Options, Probe, register_probe

HEADER = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
UUID = (8, 4, 4, 4, 12)


@register_probe("json_kv")
class JsonKv(Probe):
    """JSON key-value retrieval, with `pairs` entries.

    `groups` has the number of digits in each group of a key and of a value. `(4,)` suits small models, whose tokenizers
    have one token per digit or two. `filler` words stand after a key, inside its string; questions have the key alone.
    With `value_digits`, values are decimal numbers of one length.
    """

    pairs = (2, NUM_LEADS)
    options = ("questions", "groups", "filler", "value_digits")
    gold_position = True
    lm_eval_sizes = (8, 16)

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        pairs, groups = options.pairs, options.groups or UUID
        keys = different(pairs, split, lambda: _digits(rng, groups))
        if options.value_digits is None:
            values = tuple(_digits(rng, groups, lead + rng.choice("abcdef")) for lead in leads(rng, pairs))
        else:
            values = numbers(rng, pairs, options.value_digits)
        queried = rng.sample(range(pairs), options.questions)
        writer = Writer()
        writer.add(HEADER)
        spans = []
        words = fillers(rng, pairs, options.filler)
        for number, (key, between, value) in enumerate(zip(keys, words, values, strict=True)):
            begin, end = "{" if number == 0 else " ", '"}\n' if number == pairs - 1 else '",\n'
            spans.append(writer.add_segment(f'{begin}"{key}{between}": "', value, end))
        questions = []
        for index in queried:
            questions.append(ask(writer, f'\nKey: "{keys[index]}"\nCorresponding value: "', values, index, spans))
            writer.add('"\n')
        return Document("json_kv", writer.text, tuple(questions))


def _digits(rng: Random, groups: Sequence[int], start: str = "") -> str:
    """Random hexadecimal digits in groups, beginning with `start`."""
    count = sum(groups) - len(start)
    digits = iter(start + "".join(rng.choice("0123456789abcdef") for _ in range(count)))
    return "-".join("".join(next(digits) for _ in range(size)) for size in groups)
