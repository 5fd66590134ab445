"""Facts, letter-choice questions and their twins."""

from __future__ import annotations

from surgery.probes.documents import Document, rng_of
from surgery.probes.knowledge import (
    LETTERS,
    fact_half,
    fact_question,
    fact_statement,
    facts,
    letter_choice,
    option_text,
)
from surgery.probes.registry import PROBES, Half, Options
from surgery.probes.words import ANSWERS
from tests.support.cases import each
from tests.support.samples import cut


def prompt(document: Document) -> str:
    return document.text[: document.questions[0].answer[0]]


def listed(document: Document) -> list[str]:
    """The options of a letter-choice question, in order."""
    return [line[3:] for line in document.text.splitlines() if line[:3] in [f"{x}. " for x in LETTERS]]


def test_every_training_task_about_facts_is_one_that_an_evaluation_of_facts_is_held_out_from() -> None:
    halved = {name for name, probe in PROBES.items() if probe.trains and "half" in probe.options}
    assert set(PROBES["closed_book"].held_out_from) == halved - {"sentence"}  # other sentences are evaluated


@each("task", PROBES["closed_book"].held_out_from)
def test_training_on_half_0_never_tells_a_fact_that_is_evaluated(task: str) -> None:
    def halves(half: Half | None) -> set[int]:
        texts = [PROBES[task].generate(rng_of(seed), "train", Options(half=half)).text for seed in range(40)]
        starts = {
            fact: (f"Question: What is the {fact.relation} of {fact.name}?", fact_statement(fact).text)
            for fact in facts()
        }
        return {fact.half for fact, start in starts.items() if any(text.startswith(start) for text in texts)}

    assert (halves(0), halves(1), halves(None)) == ({0}, {1}, {0, 1})
    assert {fact_question(fact).text for fact in fact_half(1)} == {
        x.text for x in PROBES["closed_book"].evaluation_set()
    }


def test_a_fact_is_asked_without_context_over_all_answers_of_its_relation() -> None:
    for fact in facts()[:40]:
        document = fact_question(fact)
        (question,) = document.questions
        assert document.text == f"Question: What is the {fact.relation} of {fact.name}?\nAnswer: {fact.answer}"
        assert cut(document, question.answer) == f" {fact.answer}"
        assert question.choices == tuple(f" {a}" for a in ANSWERS[fact.relation])
        assert question.segment is question.value is None


@each("split", ["train", "eval"])
def test_letter_choice_has_the_shape_of_mmlu(split: str) -> None:
    known = {(f.name, f.relation): f.answer for f in facts()}
    rng = rng_of("letters", split)
    for _ in range(30):
        document = letter_choice(rng, split)
        (question,) = document.questions
        lines = document.text.split("\n")
        assert len(lines) == 2 + len(LETTERS)
        options, letter = listed(document), lines[-1].removeprefix("Answer: ")
        assert lines[-1] == f"Answer: {letter}"
        assert cut(document, question.answer) == f" {letter}"
        assert question.choices == tuple(f" {x}" for x in LETTERS)
        assert len(set(options)) == len(options) == len(LETTERS)
        relation, name = lines[0].removeprefix("Question: What is the ").removesuffix("?").split(" of ")
        assert set(options) <= set(ANSWERS[relation])
        assert options[LETTERS.index(letter)] == known[name, relation]
        assert cut(document, question.segment) == f"{letter}. {known[name, relation]}\n"
        assert cut(document, question.value) == letter


def test_the_twin_asks_the_same_and_scores_the_text_of_the_option() -> None:
    for seed in range(30):
        letter, twin = letter_choice(rng_of(seed)), option_text(rng_of(seed))
        (lettered,), (question,) = letter.questions, twin.questions
        assert prompt(twin) == letter.text.split("\n")[0] + "\nAnswer:"
        assert question.choices == tuple(f" {o}" for o in listed(letter))
        assert question.gold == lettered.gold
        assert cut(twin, question.answer) == question.choices[question.gold]
        assert twin.text.endswith(question.choices[question.gold])
        assert question.segment is question.value is None
