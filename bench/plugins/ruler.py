"""Two more tasks of RULER (Hsieh et al., arXiv 2404.06654), with a length in tokens. Needles are in `needle`.

    PYTHONPATH=. surgery run quickstart plugins=[bench.plugins.ruler] evaluate.generate=[] \\
        'evaluate.tasks=[{task: variable_tracking, tokens: [512]}, {task: common_words, tokens: [512]}]'

`variable_tracking` follows assignments. Its answer lists every variable of one chain, in the order of the text:

    Memorize and track the chain(s) of variable assignment hidden in the following text.

    The old baker ...
    VAR KXMZO = 52417
    A small fox ...
    VAR BQWEP = VAR KXMZO
    Question: Find all variables that are assigned the value 52417 in the text above. Answer: According to the chain(s)
    of variable assignment in the text above, 2 variables are assigned the value 52417, they are: KXMZO, BQWEP

`common_words` counts. Its answer lists the words that occur most often, in any order:

    Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear
    most often.
    1. balomi 2. kutefa 3. balomi ...
    Question: What are the 4 most common words in the above list? Answer: The top 4 words that appear most often in the
    list are: balomi, ...

Differences from RULER: variable tracking has a second chain with another value, sentences of this toolkit as its text,
and answers with commas; words are invented; and below 4,096 tokens a common word occurs 10 times instead of 30.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from surgery.errors import ProbeError
from surgery.probes.documents import Document, Question, Split, Writer, draw
from surgery.probes.needle import fill_with_sentences, token_count
from surgery.probes.registry import Options, Probe, register_probe
from surgery.probes.words import SYLLABLES

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LONG = 4096  # tokens from which common words have RULER's frequency
_RARE = 3  # occurrences of every other word


def variable_document(
    rng: Random, length: int, size: Callable[[str], int], hops: int = 2, split: Split = "train"
) -> Document:
    """Generate a text with two chains of assignments, and ask for all variables of one.

    Args:
        rng: source of randomness.
        length: maximum length of the text up to the end of the last answer, in the unit of `size`.
        size: function from a text to its length, such as `needle.token_count(tokenizer)`.
        hops: assignments from variable to variable in a chain, so it has `hops + 1` variables.
        split: the splits have different variables and sentences.

    Raises:
        ProbeError: the assignments and the question do not fit.
    """
    count = hops + 1
    names = draw(split, lambda: " ".join("".join(rng.choice(_LETTERS) for _ in range(5)) for _ in range(2 * count)))
    chains = names.split()[:count], names.split()[count:]
    values = [str(n) for n in rng.sample(range(10_000, 100_000), 2)]
    lines = [
        [f"VAR {name} = {f'VAR {chain[i - 1]}' if i else value}" for i, name in enumerate(chain)]
        for chain, value in zip(chains, values, strict=True)
    ]
    places = sorted((rng.random(), rng.randrange(2)) for _ in range(2 * count))

    def build(hay: Sequence[str]) -> Document:
        writer = Writer()
        writer.add("Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n")
        waiting, written = [list(chain) for chain in lines], 0
        spans = {}
        for place, drawn in places:
            until = round(place * len(hay))
            if until > written:
                writer.add(" ".join(hay[written:until]) + "\n")
                written = until
            chain = drawn if waiting[drawn] else 1 - drawn
            line = waiting[chain].pop(0)
            start, end = writer.add(line + "\n")
            name = start + len("VAR ")
            spans[line.split()[1]] = (start, end), (name, name + 5)
        writer.add(" ".join(hay[written:]) + "\n" if hay[written:] else "")
        writer.add(f"Question: Find all variables that are assigned the value {values[0]} in the text above. ")
        writer.add("Answer: According to the chain(s) of variable assignment in the text above, ")
        writer.add(f"{count} variables are assigned the value {values[0]}, they are:")
        questions = []
        for i, variable in enumerate(chains[0]):
            writer.add("," if i else "")
            answer = writer.add(f" {variable}")
            segment, value = spans[variable]
            questions.append(Question(answer, (), 0, segment=segment, value=value))
        return Document("variable_tracking", writer.text, tuple(questions))

    return build(fill_with_sentences(rng, length, size, split, build))


def words_document(
    rng: Random, length: int, size: Callable[[str], int], common: int = 4, split: Split = "train"
) -> Document:
    """Generate a numbered list of words, and ask for those that occur most often.

    Args:
        rng: source of randomness.
        length, size: as in `variable_document`.
        common: number of words that occur often.
        split: the splits have different words.

    Raises:
        ProbeError: the common words and the question do not fit.
    """
    often = 30 if length >= _LONG else 10
    seed, words = rng.random(), dict[str, None]()

    def of(number: int) -> list[str]:
        """Return the first words, drawing more if there are too few."""
        while len(words) < number:
            words[draw(split, lambda: "".join(rng.choice(SYLLABLES) for _ in range(3)))] = None
        return list(words)[:number]

    def build(others: int) -> Document:
        known = of(common + others)
        listed = known[:common] * often + known[common:] * _RARE
        Random(f"{seed}:{others}").shuffle(listed)
        writer = Writer()
        writer.add("Below is a numbered list of words. In these words, some appear more often than others. ")
        writer.add("Memorize the ones that appear most often.\n")
        writer.add(" ".join(f"{number}. {word}" for number, word in enumerate(listed, start=1)))
        writer.add(f"\nQuestion: What are the {common} most common words in the above list? ")
        writer.add(f"Answer: The top {common} words that appear most often in the list are:")
        questions = []
        for i, word in enumerate(known[:common]):
            writer.add("," if i else "")
            questions.append(Question(writer.add(f" {word}"), (), 0))
        return Document("common_words", writer.text, tuple(questions))

    least = size(build(0).text)
    if least > length:
        hint = f"The common words and the question alone need {least}. Increase it, or lower `needles`."
        raise ProbeError("tokens", length, hint)
    low, high = 0, 1  # `low` other words fit; with `high` the list is too long
    while size(build(high).text) <= length:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(build(middle).text) <= length else (low, middle)
    return build(low)


class _Sized(Probe):
    """A task of RULER. Without a tokenizer, lengths are in characters."""

    scoring = "generation"
    pairs = (2, 16)
    needs_tokenizer = True
    has_depth = False
    lm_eval_group = None  # lm-eval has RULER's own


@register_probe("variable_tracking")
class VariableTracking(_Sized):
    """Variable tracking: `variable_document`."""

    pairs = None
    options = ("tokens", "hops")
    gold_position = True

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        """Generate a text with two chains of assignments, and the question."""
        size = token_count(options.tokenizer) if options.tokenizer is not None else len
        return variable_document(rng, options.tokens, size, options.hops, split)


@register_probe("common_words")
class CommonWords(_Sized):
    """Common words extraction: `words_document`. `needles`, in training `pairs`, is the number of common words."""

    options = ("tokens", "needles")

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        """Generate a numbered list of words, and the question."""
        size = token_count(options.tokenizer) if options.tokenizer is not None else len
        return words_document(rng, options.tokens, size, options.needles, split)


__all__ = ["variable_document", "words_document"]
