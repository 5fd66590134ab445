"""Multi-hop retrieval: a dictionary in which a value may be the next key.

    Memorize the following dictionary:
    key:value
    ...
    Going on from the key 'balo' to the key that is its value, until there is a number, one finds42

The text is that of KV-retrieval (arXiv 2504.18574) with another question. RULER's variable tracking has chains of
assignments (arXiv 2404.06654).
"""

from __future__ import annotations

from random import Random

from surgery.errors import ProbeError
from surgery.probes.documents import Document, Split, Writer
from surgery.probes.kv_retrieval import HEADER, NUM_VALUES, write_lines
from surgery.probes.pairs import ask, fillers
from surgery.probes.registry import Options, Probe, register_probe
from surgery.probes.words import key_words


@register_probe("multi_hop")
class MultiHop(Probe):
    """Multi-hop retrieval, with `pairs` lines. Lines that do not fill a whole chain have a number as their value."""

    pairs = (4, NUM_VALUES)
    options = ("hops", "filler")
    gold_position = newline_ends_answer = True

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        """Generate shuffled lines, and a question whose answer is `hops` lines away. The choices are all numbers.

        Raises:
            ProbeError: `hops` is less than 2, or `pairs` is too small for two chains.
        """
        pairs, hops = options.pairs, options.hops
        if hops < 2:
            raise ProbeError("hops", hops, "One hop is kv_retrieval. Use 2 or more.")
        chains, rest = divmod(pairs, hops)
        if chains < 2:
            hint = f"With {hops} hops, two chains need {2 * hops} lines. Use {2 * hops} to {NUM_VALUES}."
            raise ProbeError("pairs", pairs, hint)
        keys = rng.sample(key_words(split), pairs)
        numbers = tuple(str(n) for n in rng.sample(range(NUM_VALUES), chains + rest))
        lines = []
        for chain in range(chains):
            chain_keys = keys[chain * hops : (chain + 1) * hops]
            lines += list(zip(chain_keys, [*chain_keys[1:], numbers[chain]], strict=True))
        lines += list(zip(keys[chains * hops :], numbers[chains:], strict=True))
        rng.shuffle(lines)
        gold = rng.randrange(chains)
        writer = Writer()
        writer.add(HEADER)
        ordered, values = zip(*lines, strict=True)
        written = write_lines(writer, ordered, fillers(rng, pairs, options.filler), values)
        prompt = f"Going on from the key '{keys[gold * hops]}' to the key that is its value, "
        spans = [written[ordered.index(keys[(chain + 1) * hops - 1])] for chain in range(chains)]
        question = ask(writer, f"{prompt}until there is a number, one finds", numbers, gold, spans)
        return Document("multi_hop", writer.text, (question,))
