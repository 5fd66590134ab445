"""Closed-book facts about invented people, letter-choice questions about them, and option-text questions.

Closed-book facts measure knowledge without retrieval, so surgery should not change their accuracy. A letter-choice
question has the format of MMLU: the model must know the answer and look up its letter. An option-text question asks
for the text of the option instead (lm-eval's `mmlu_continuation`). The difference in accuracy is due to retrieval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from surgery.probes.documents import Document, Question, Split, Writer, draw, rng_of
from surgery.probes.pairs import ask
from surgery.probes.registry import Half, Options, Probe, register_probe
from surgery.probes.words import ANSWERS, RELATIONS, entity_names

LETTERS = ("A", "B", "C", "D")
_ABOUT_FACTS = ("closed_book", "statement", "letter_choice", "option_text")
STATEMENTS = {
    "job": "{name} works as a {answer}.",
    "pet": "{name} keeps a {answer} as a pet.",
    "colour": "{name} paints every door {answer}.",
    "drink": "{name} drinks {answer} every day.",
}


@dataclass(frozen=True)
class Fact:
    """The `relation` of `name` is `answer`. Training may use the facts of `half` 0; those of half 1 are held out."""

    name: str
    relation: str
    answer: str
    half: int


@cache
def facts() -> tuple[Fact, ...]:
    """Return the 400 facts, always the same: every invented person has a job, a pet, a colour and a drink."""
    rng = rng_of("facts")
    answers = [(name, relation, rng.choice(ANSWERS[relation])) for name in entity_names() for relation in RELATIONS]
    return tuple(Fact(*fact, half=rng.randrange(2)) for fact in answers)


@cache
def fact_half(half: Half | None) -> tuple[Fact, ...]:
    """Return the facts of one half, or all facts if None."""
    return tuple(f for f in facts() if half is None or f.half == half)


def _question(fact: Fact) -> str:
    return f"Question: What is the {fact.relation} of {fact.name}?\n"


def fact_question(fact: Fact) -> Document:
    """Turn a fact into a question without context. The choices are all answers of its relation."""
    writer = Writer()
    writer.add(_question(fact) + "Answer:")
    answer = writer.add(f" {fact.answer}")
    options = ANSWERS[fact.relation]
    choices = tuple(f" {o}" for o in options)
    return Document("closed_book", writer.text, (Question(answer, choices, options.index(fact.answer)),))


def fact_statement(fact: Fact) -> Document:
    """Turn a fact into a plain sentence."""
    return Document("statement", STATEMENTS[fact.relation].format(name=fact.name, answer=fact.answer))


def letter_choice(rng: Random, split: Split = "train", half: Half | None = None, lettered: bool = True) -> Document:
    """Generate a question with options `A.` to `D.`, whose answer is a letter. The splits have different options.

    Args:
        half: half of the facts to ask about.
        lettered: False for the same question without its list of options, whose answer is the text of the option.
            Without the list, the prompts of both splits are the same: set `half` in training.
    """
    drawn: list[tuple[Fact, list[str]]] = []

    def listing() -> str:
        fact = rng.choice(fact_half(half))
        options = rng.sample([a for a in ANSWERS[fact.relation] if a != fact.answer], len(LETTERS) - 1)
        options.insert(rng.randrange(len(LETTERS)), fact.answer)
        drawn.append((fact, options))
        return _question(fact) + "".join(f"{x}. {o}\n" for x, o in zip(LETTERS, options, strict=True))

    draw(split, listing)
    fact, options = drawn[-1]
    gold = options.index(fact.answer)
    writer = Writer()
    writer.add(_question(fact))
    if not lettered:
        writer.add("Answer:")
        choices = tuple(f" {o}" for o in options)
        answer = writer.add(choices[gold])
        return Document("option_text", writer.text, (Question(answer, choices, gold),))
    spans = []
    for letter, option in zip(LETTERS, options, strict=True):
        start, end = writer.add(letter)
        _, segment_end = writer.add(f". {option}\n")
        spans.append(((start, segment_end), (start, end)))
    question = ask(writer, "Answer:", [f" {x}" for x in LETTERS], gold, spans)
    return Document("letter_choice", writer.text, (question,))


@register_probe("letter_choice")
class LetterChoice(Probe):
    """Letter-choice questions: `letter_choice`."""

    gold_position = newline_ends_answer = True
    seed_name = "letter"  # the same seed as `option_text`: both ask about the same facts
    options = ("half",)
    lm_eval_group = "knowledge"

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        return letter_choice(rng, split, options.half)


@register_probe("option_text")
class OptionText(Probe):
    """Letter-choice questions without listed options. An evaluation asks about facts of both halves."""

    label = "option text (letter choice without letters)"
    short_label = "option text"
    knowledge = newline_ends_answer = True
    seed_name = "letter"
    options = ("half",)
    lm_eval_group = "knowledge"
    held_out_from = _ABOUT_FACTS
    evaluated = None

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        return letter_choice(rng, split, options.half, lettered=False)


@register_probe("closed_book")
class ClosedBook(Probe):
    """Closed-book questions. An evaluation uses all facts of the half that is held out from training."""

    label = "closed-book facts, held-out half"
    short_label = "closed book"
    knowledge = newline_ends_answer = True
    options = ("half",)
    lm_eval_group: str | None = "knowledge"
    held_out_from: tuple[str, ...] = _ABOUT_FACTS

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        return fact_question(rng.choice(fact_half(options.half)))

    def evaluation_set(self) -> Sequence[Document] | None:
        return [fact_question(fact) for fact in fact_half(self.evaluated)]


@register_probe("closed_book_seen")
class SeenClosedBook(ClosedBook):
    """Closed-book questions about the half of the facts that training may use."""

    label = "closed-book facts, half seen in training"
    short_label = "closed book seen"
    trains = False
    lm_eval_group = None
    held_out_from = ()
    evaluated = 0


@register_probe("statement")
class Statement(Probe):
    """Facts as plain sentences, to train on: `fact_statement`."""

    evaluates = False
    scoring = "perplexity"
    options = ("half",)
    lm_eval_group = None

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        return fact_statement(rng.choice(fact_half(options.half)))
