"""Multi-hop retrieval: a dictionary in which a value may be the next key.

    Memorize the following dictionary:
    key:value
    ...
    Going on from the key 'balo' to the key that is its value, until there is a number, one finds42

The text is KV-retrieval's (arXiv 2504.18574) but for the question; chains of assignments are RULER's variable tracking
(arXiv 2404.06654). Owns: that text. Must never know: models.
"""

from __future__ import annotations

from random import Random

from surgery.errors import ProbeError
from surgery.probes.documents import Document, Question, Split, Writer
from surgery.probes.kv_retrieval import HEADER, NUM_VALUES
from surgery.probes.registry import Options, Probe, register_probe
from surgery.probes.words import key_words


def hop_document(rng: Random, pairs: int, hops: int = 2, split: Split = "train") -> Document:
    """A dictionary of `pairs` lines in any order, and a question whose answer is `hops` lines away.

    Lines that are left over beside whole chains are one line away from their number. The choices are all numbers.

    Raises:
        ProbeError: a hop or none, lines for fewer than two chains, more keys or numbers than there are.
    """
    keys_available = key_words(split)
    if hops < 2:
        raise ProbeError("hops", hops, "With one line it is KV-retrieval: choose 2 or more.")
    chains, rest = divmod(pairs, hops)
    most = min(len(keys_available), NUM_VALUES * hops)
    if chains < 2 or pairs > most or chains + rest > NUM_VALUES:
        raise ProbeError("pairs", pairs, f"Two chains of {hops} lines or more: choose {2 * hops} to {most}.")
    keys = rng.sample(keys_available, pairs)
    numbers = tuple(str(n) for n in rng.sample(range(NUM_VALUES), chains + rest))
    lines = []
    for chain in range(chains):
        own = keys[chain * hops : (chain + 1) * hops]
        lines += list(zip(own, [*own[1:], numbers[chain]], strict=True))
    lines += list(zip(keys[chains * hops :], numbers[chains:], strict=True))
    rng.shuffle(lines)
    writer = Writer()
    writer.add(HEADER)
    spans = {}
    for key, value in lines:
        start, _ = writer.add(f"{key}:")
        value_span = writer.add(value)
        _, end = writer.add("\n")
        spans[key] = ((start, end), value_span)
    asked = rng.randrange(chains)
    writer.add(f"Going on from the key '{keys[asked * hops]}' to the key that is its value, ")
    writer.add("until there is a number, one finds")
    answer = writer.add(numbers[asked])
    segment, value_span = spans[keys[(asked + 1) * hops - 1]]
    return Document("multi_hop", writer.text, (Question(answer, numbers, asked, segment=segment, value=value_span),))


@register_probe("multi_hop")
class MultiHop(Probe):
    """Multi-hop retrieval: `hop_document`."""

    pairs = (4, NUM_VALUES)
    options = ("hops",)
    gold_position = newline_ends_answer = True

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        """A dictionary with chains and one question."""
        return hop_document(rng, options.pairs, options.hops, split)
