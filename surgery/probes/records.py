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

from surgery.errors import ProbeError
from surgery.probes.documents import Document, Question, Span, Split, Writer
from surgery.probes.pairs import NUM_LEADS, Range, check_questions, fillers, numbers
from surgery.probes.phonebook import Space, space_of
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


def records_document(
    rng: Random,
    pairs: int,
    questions: int = 1,
    split: Split = "train",
    space: Space = "answer",
    filler: Range | None = None,
    value_digits: Range | None = None,
) -> Document:
    """Generate records and questions about different ones.

    Fillers are drawn last: a document with them has the names, numbers, sentences and questions of the one without.

    Args:
        rng: source of randomness.
        pairs: number of records.
        questions: number of questions.
        split: the splits have different names.
        space: whether the space before a number belongs to the `answer` or to the `prompt`. Depends on the tokenizer;
            see `phonebook.space_of`.
        filler: smallest and largest number of words inserted between a name and its number. None for none.
        value_digits: smallest and largest number of digits of the numbers, which all have the same. None for two.

    Raises:
        ProbeError: fewer than 2 pairs, more pairs than names or numbers, or more questions than pairs.
    """
    names_available = key_words(split)
    if not 2 <= pairs <= len(names_available):
        raise ProbeError("pairs", pairs, f"Every record has another name. Use 2 to {len(names_available)}.")
    check_questions(questions, pairs)
    names = [word.capitalize() for word in rng.sample(names_available, pairs)]
    before, first = ("", " ") if space == "answer" else (" ", "")
    choices = tuple(first + number for number in numbers(rng, pairs, value_digits or TWO_DIGITS))
    separator = rng.choice((" ", "\n"))
    sentences = [_sentence(rng, name) for name in names]
    queried = [(index, rng.choice(QUESTIONS)) for index in rng.sample(range(pairs), questions)]
    writer = Writer()
    writer.add(HEADER)
    spans: list[tuple[Span, Span]] = []
    for (opening, ending), words, choice in zip(sentences, fillers(rng, pairs, filler), choices, strict=True):
        if spans:
            writer.add(separator)
        start, _ = writer.add(f"{opening}{words}{ending}{before}")
        value = writer.add(choice)
        _, end = writer.add(".")
        spans.append(((start, end), value))
    drawn_questions = []
    for index, question in queried:
        writer.add(f"\n{question.format(name=names[index])}{before}")
        answer = writer.add(choices[index])
        segment, value = spans[index]
        drawn_questions.append(Question(answer, choices, index, segment=segment, value=value))
    writer.add("\n")
    return Document("records", writer.text, tuple(drawn_questions))


def _sentence(rng: Random, name: str) -> tuple[str, str]:
    """Draw a template and its words. Returns the parts before and after the filler."""
    opening, ending = rng.choice(TEMPLATES)
    words = {"thing": THINGS, "size": SIZES, "time": TIMES, "place": PLACES}
    return opening.format(name=name, **{kind: rng.choice(drawn) for kind, drawn in words.items()}), ending


@register_probe("records")
class Records(Probe):
    """Records in prose: `records_document`."""

    label = "records in prose"
    short_label = "records"
    unit = "records"
    pairs = (2, NUM_LEADS)
    options = ("questions", "filler", "value_digits")
    gold_position = newline_ends_answer = needs_tokenizer = True
    lm_eval_sizes = (4, 8)

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        """Generate records and questions about them."""
        space = space_of(options.tokenizer) if options.tokenizer else "answer"
        return records_document(
            rng, options.pairs, options.questions, split, space, options.filler, options.value_digits
        )
