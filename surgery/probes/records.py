"""Records in prose: a sentence for each case, with a name and the number of an agent.

    Memorize the following records:
    Balo wrote about the letter; this case is now with agent 42.
    A letter from Kemi went to agent 17.
    ...
    The case of Balo is now with agent 42

The number stands several words after the name, in sentences of several templates, which one document joins by spaces
or by newlines. `filler` inserts more words between the two.
"""

from __future__ import annotations

from random import Random

from surgery.probes.documents import Document, Span, Split, Writer
from surgery.probes.pairs import NUM_LEADS, ask, fillers, numbers
from surgery.probes.phonebook import spaces
from surgery.probes.registry import Options, Probe, register_probe
from surgery.probes.words import PLACES, SIZES, THINGS, TIMES, key_words

HEADER = "Memorize the following records:\n"
TWO_DIGITS = (2, 2)
# The filler stands between the two parts, the number after the second.
TEMPLATES = (
    ("{name} wrote about the {thing}", "; this case is now with agent"),
    ("{name} asked for the {size} {thing}", "; the case was brought to agent"),
    ("In the {time} {name} came to the {place}", ", and the case went to agent"),
    ("The {thing} of {name} was lost at the {place}", "; the new case is with agent"),
    ("A letter from {name}", " went to agent"),
)
QUESTIONS = (
    "The case of {name} is now with agent",
    "The agent with the case of {name} is agent",
    "{name} has a case with agent",
)


@register_probe("records")
class Records(Probe):
    """Records in prose, with `pairs` records. Numbers have two digits, or those of `value_digits`."""

    label = "records in prose"
    short_label = "records"
    unit = "records"
    pairs = (2, NUM_LEADS)
    options = ("questions", "filler", "value_digits")
    gold_position = newline_ends_answer = needs_tokenizer = True
    lm_eval_sizes = (4, 8)

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        """Generate records and questions about different ones.

        Fillers are drawn last: a document with them has the names, numbers, sentences and questions of one without.
        """
        pairs = options.pairs
        names = [word.capitalize() for word in rng.sample(key_words(split), pairs)]
        before, first = spaces(options.tokenizer)
        choices = tuple(first + number for number in numbers(rng, pairs, options.value_digits or TWO_DIGITS))
        separator = rng.choice((" ", "\n"))
        sentences = [_sentence(rng, name) for name in names]
        queried = [(index, rng.choice(QUESTIONS)) for index in rng.sample(range(pairs), options.questions)]
        writer = Writer()
        writer.add(HEADER)
        spans: list[tuple[Span, Span]] = []
        words = fillers(rng, pairs, options.filler)
        for (opening, ending), between, choice in zip(sentences, words, choices, strict=True):
            if spans:
                writer.add(separator)
            spans.append(writer.add_segment(f"{opening}{between}{ending}{before}", choice, "."))
        questions = [
            ask(writer, f"\n{question.format(name=names[index])}{before}", choices, index, spans)
            for index, question in queried
        ]
        writer.add("\n")
        return Document("records", writer.text, tuple(questions))


def _sentence(rng: Random, name: str) -> tuple[str, str]:
    """Draw a template and its words. Returns the parts before and after the filler."""
    opening, ending = rng.choice(TEMPLATES)
    words = {"thing": THINGS, "size": SIZES, "time": TIMES, "place": PLACES}
    return opening.format(name=name, **{kind: rng.choice(drawn) for kind, drawn in words.items()}), ending
