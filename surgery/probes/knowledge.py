"""Closed-book facts about invented people, letter-choice questions about them, and the option-text twins.

Facts measure knowledge: nothing to retrieve, so surgery must not move them. A letter-choice question has the shape
of MMLU: knowing the answer is not enough, its letter has to be looked up. Its twin scores the option's text instead
(lm-eval's `mmlu_continuation`): the difference is retrieval. Owns: these texts. Must never know: models.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random

from surgery.probes.documents import Document, Question, Split, Writer, draw, rng_of
from surgery.probes.words import ANSWERS, RELATIONS, entity_names

LETTERS = ("A", "B", "C", "D")
STATEMENTS = {
    "job": "{name} works as a {answer}.",
    "pet": "{name} keeps a {answer} as a pet.",
    "colour": "{name} paints every door {answer}.",
    "drink": "{name} drinks {answer} every day.",
}


@dataclass(frozen=True)
class Fact:
    """`name`'s `relation` is `answer`; `half` 0 or 1 splits the facts into those a KL term may see and the rest."""

    name: str
    relation: str
    answer: str
    half: int


@cache
def facts() -> tuple[Fact, ...]:
    """400 facts: every invented person has a job, a pet, a colour and a drink. Always the same ones."""
    rng = rng_of("facts")
    made = [(name, relation, rng.choice(ANSWERS[relation])) for name in entity_names() for relation in RELATIONS]
    return tuple(Fact(*fact, half=rng.randrange(2)) for fact in made)


def _question(fact: Fact) -> str:
    return f"Question: What is the {fact.relation} of {fact.name}?\n"


def fact_question(fact: Fact) -> Document:
    """The fact, asked with no context; scored over all answers that its relation can have."""
    writer = Writer()
    writer.add(_question(fact) + "Answer:")
    answer = writer.add(f" {fact.answer}")
    options = ANSWERS[fact.relation]
    choices = tuple(f" {o}" for o in options)
    return Document("closed_book", writer.text, (Question(answer, choices, options.index(fact.answer)),))


def fact_statement(fact: Fact) -> Document:
    """The fact as a plain sentence."""
    return Document("statement", STATEMENTS[fact.relation].format(name=fact.name, answer=fact.answer))


def letter_choice(rng: Random, split: Split = "train") -> Document:
    """Question, options `A.` to `D.`, `Answer:`; the answer is the letter. Prompts of the two splits differ."""
    return _multiple_choice(rng, split, twin=False)


def option_text(rng: Random, split: Split = "train") -> Document:
    """The twin of a letter-choice question: the same fact and options, unlisted, scored by the option's text."""
    return _multiple_choice(rng, split, twin=True)


def _multiple_choice(rng: Random, split: Split, twin: bool) -> Document:
    drawn: list[tuple[Fact, list[str]]] = []

    def listing() -> str:
        fact = rng.choice(facts())
        options = rng.sample([a for a in ANSWERS[fact.relation] if a != fact.answer], len(LETTERS) - 1)
        options.insert(rng.randrange(len(LETTERS)), fact.answer)
        drawn.append((fact, options))
        return _question(fact) + "".join(f"{x}. {o}\n" for x, o in zip(LETTERS, options, strict=True))

    draw(split, listing)
    fact, options = drawn[-1]
    gold = options.index(fact.answer)
    writer = Writer()
    writer.add(_question(fact))
    if twin:
        writer.add("Answer:")
        choices = tuple(f" {o}" for o in options)
        return Document("option_text", writer.text + choices[gold], (_closed(writer, choices, gold),))
    spans = []
    for letter, option in zip(LETTERS, options, strict=True):
        start, end = writer.add(letter)
        _, segment_end = writer.add(f". {option}\n")
        spans.append(((start, segment_end), (start, end)))
    writer.add("Answer:")
    choices = tuple(f" {x}" for x in LETTERS)
    answer = writer.add(choices[gold])
    segment, value = spans[gold]
    return Document("letter_choice", writer.text, (Question(answer, choices, gold, segment=segment, value=value),))


def _closed(writer: Writer, choices: tuple[str, ...], gold: int) -> Question:
    start = len(writer.text)
    return Question((start, start + len(choices[gold])), choices, gold)
