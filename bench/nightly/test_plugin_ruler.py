"""Variable tracking and common words: the answers follow from the text alone, and the text fits."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from bench.plugins.ruler import variable_document, words_document
from surgery.errors import ProbeError
from surgery.probes.documents import Split, rng_of
from surgery.probes.needle import token_count
from surgery.probes.registry import PROBES, Options
from surgery.recipe import Evaluate
from tests.support.pico import pico_tokenizer


def answers(document: object) -> list[str]:
    text, questions = document.text, document.questions  # type: ignore[attr-defined]
    return [text[slice(*question.answer)].strip() for question in questions]


@pytest.mark.parametrize(("hops", "seed"), [(2, 0), (2, 1), (4, 2)])
def test_the_variables_of_an_answer_are_those_of_the_value(hops: int, seed: int) -> None:
    document = variable_document(rng_of(seed), 3000, len, hops, "eval")
    value = re.search(r"assigned the value (\d+) in", document.text)
    assert value is not None
    known: dict[str, str] = {}
    for name, source in re.findall(r"^VAR (\w+) = (?:VAR )?(\w+)$", document.text, re.MULTILINE):
        known[name] = known.get(source, source)
    assert len(known) == 2 * (hops + 1) and len(set(known.values())) == 2
    assert answers(document) == [name for name, number in known.items() if number == value.group(1)]
    for question, name in zip(document.questions, answers(document), strict=True):
        assert question.segment is not None and question.value is not None
        assert document.text[slice(*question.value)] == name
        assert document.text[slice(*question.segment)].startswith(f"VAR {name} = ")


def test_the_words_of_an_answer_are_the_most_frequent() -> None:
    document = words_document(rng_of(3), 3000, len, 4, "eval")
    counts = Counter(re.findall(r"\d+\. (\w+)", document.text.split("\nQuestion")[0]))
    assert {word for word, _ in counts.most_common(4)} == set(answers(document))
    assert sorted(set(counts.values())) == [3, 10]
    longer = words_document(rng_of(3), 9000, len, 4, "eval")
    counts = Counter(re.findall(r"\d+\. (\w+)", longer.text.split("\nQuestion")[0]))
    assert sorted(set(counts.values())) == [3, 30]


@pytest.mark.parametrize("task", ["variable_tracking", "common_words"])
def test_a_document_fills_its_length_in_tokens(task: str) -> None:
    tokenizer = pico_tokenizer()
    options = Options(tokens=700, tokenizer=tokenizer)
    probe = PROBES[task]
    document = probe.generate(rng_of(task), "eval", options)
    assert 660 < token_count(tokenizer)(document.text) <= 700
    assert document == probe.generate(rng_of(task), "eval", options)
    names: dict[Split, set[str]] = {"train": set(), "eval": set()}
    for split in names:
        for i in range(5):
            names[split] |= set(answers(probe.generate(rng_of(task, i), split, options)))
    assert names["train"] and not names["train"] & names["eval"]
    with pytest.raises(ProbeError, match="alone need"):
        probe.generate(rng_of(task), "eval", Options(tokens=30, tokenizer=tokenizer))


def test_these_tasks_have_lengths_and_no_depth() -> None:
    section = Evaluate(tasks=[{"task": "variable_tracking", "tokens": [512], "hops": 4}])  # type: ignore[list-item]
    assert section.tasks[0].hops == 4
    with pytest.raises(ValueError, match="common_words does not use `depths`"):
        Evaluate(tasks=[{"task": "common_words", "depths": [0.5]}])  # type: ignore[list-item]
