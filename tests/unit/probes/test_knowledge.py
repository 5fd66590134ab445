"""Facts, letter-choice questions and their twins."""

from __future__ import annotations

from collections import Counter

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
from surgery.probes.words import ANSWERS, RELATIONS, entity_names
from tests.support.cases import each
from tests.support.pico import pico_tokenizer
from tests.support.samples import cut


def prompt(document: Document) -> str:
    return document.text[: document.questions[0].answer[0]]


def listed(document: Document) -> list[str]:
    """The options of a letter-choice question, in order."""
    return [line[3:] for line in document.text.splitlines() if line[:3] in [f"{x}. " for x in LETTERS]]


def test_there_are_enough_facts_and_no_two_about_the_same() -> None:
    assert len(facts()) >= 300
    assert len({(f.name, f.relation) for f in facts()}) == len(facts())
    assert {f.name for f in facts()} <= set(entity_names())
    assert {f.relation for f in facts()} == set(RELATIONS)
    assert all(f.answer in ANSWERS[f.relation] for f in facts())


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


def test_facts_are_always_the_same_ones() -> None:
    before = facts()
    facts.cache_clear()
    assert facts() == before


def test_no_answer_is_right_so_often_that_it_can_be_guessed() -> None:
    for relation in RELATIONS:
        counts = Counter(f.answer for f in facts() if f.relation == relation)
        assert max(counts.values()) <= 0.2 * sum(counts.values())


def test_halves_are_disjoint_and_neither_is_small() -> None:
    halves = [{f for f in facts() if f.half == half} for half in (0, 1)]
    assert halves[0] | halves[1] == set(facts())
    assert not halves[0] & halves[1]
    assert min(map(len, halves)) > 0.4 * len(facts())
    texts = [{fact_statement(f).text for f in half} | {fact_question(f).text for f in half} for half in halves]
    assert not texts[0] & texts[1]
    assert all({f.relation for f in half} == set(RELATIONS) for half in halves)


def test_a_fact_is_asked_without_context_over_all_answers_of_its_relation() -> None:
    for fact in facts()[:40]:
        document = fact_question(fact)
        (question,) = document.questions
        assert document.text == f"Question: What is the {fact.relation} of {fact.name}?\nAnswer: {fact.answer}"
        assert cut(document, question.answer) == f" {fact.answer}"
        assert question.choices == tuple(f" {a}" for a in ANSWERS[fact.relation])
        assert question.segment is question.value is None


def test_a_fact_can_be_told() -> None:
    for fact in facts()[:40]:
        document = fact_statement(fact)
        assert fact.name in document.text
        assert fact.answer in document.text
        assert "{" not in document.text
        assert document.questions == ()


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


def test_every_letter_is_right_about_as_often() -> None:
    rng = rng_of("balance")
    counts = Counter(letter_choice(rng).questions[0].gold for _ in range(400))
    assert set(counts) == set(range(len(LETTERS)))
    assert all(70 <= n <= 130 for n in counts.values())


@each("make", [letter_choice, option_text])
def test_the_same_seed_gives_the_same_question_whatever_came_before(make: object) -> None:
    assert callable(make)
    first = make(rng_of("order", 1))
    make(rng_of("order", 2))
    assert make(rng_of("order", 1)) == first


def test_prompts_of_the_splits_are_disjoint() -> None:
    prompts = {
        split: {prompt(letter_choice(rng_of("split", i), split)) for i in range(150)} for split in ("train", "eval")
    }
    assert not prompts["train"] & prompts["eval"]
    assert min(map(len, prompts.values())) > 140


def test_answers_of_a_relation_start_with_different_tokens() -> None:
    tokenizer = pico_tokenizer()
    for options in (*ANSWERS.values(), LETTERS):
        starts = [ids[0] for ids in tokenizer([f" {o}" for o in options])["input_ids"]]
        assert len(set(starts)) == len(options)
