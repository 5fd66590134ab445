"""Prompts that contain their text twice: the same question, later in the text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from surgery.evaluate.evaluation import evaluate_model
from surgery.evaluate.prompts import make_prompts
from surgery.evaluate.read_twice import prompts_twice, read_twice
from surgery.probes.documents import Document, rng_of
from surgery.probes.registry import PROBES, Options
from surgery.recipe import Evaluate
from tests.support.pico import pico_base, pico_tokenizer


@pytest.mark.parametrize("task", ["kv_retrieval", "records", "needle_multi_query", "closed_book"])
def test_the_question_is_that_of_the_second_reading(task: str) -> None:
    options = Options(pairs=4, questions=1, needles=3, tokens=320, tokenizer=pico_tokenizer())
    probe = PROBES[task]
    given = probe.evaluation_set()
    once = given[0] if given else probe.generate(rng_of(task), "eval", options)
    twice = read_twice(once)
    shift = len(twice.text) - len(once.text)
    assert twice.text.endswith(once.text) and twice.text[: shift - 1] == once.text[: shift - 1]
    assert twice.text[shift - 1] == "\n"
    for question, moved in zip(once.questions, twice.questions, strict=True):
        for name in ("answer", "segment", "value"):
            span, other = getattr(question, name), getattr(moved, name)
            assert (span is None) == (other is None)
            if span is not None:
                assert other[0] >= shift and once.text[slice(*span)] == twice.text[slice(*other)]
        assert moved.choices == question.choices and moved.gold == question.gold
    first = min(question.answer[0] for question in once.questions)
    assert shift == first + 1 or len(once.questions) > 1, "no answer stands in the first reading"
    assert read_twice(begun(once), "<s>") == begun(twice), "one BOS"


def begun(document: Document) -> Document:
    """As a chat template may write it."""
    moved = [
        replace(q, **{n: s and (s[0] + 3, s[1] + 3) for n in ("answer", "segment", "value") for s in [getattr(q, n)]})
        for q in document.questions
    ]
    return Document(document.task, f"<s>{document.text}", tuple(moved))


def test_every_task_with_answers_is_measured_and_no_text() -> None:
    section = Evaluate(tasks=("kv_retrieval", "closed_book", "perplexity"), pairs=(4,), examples=5, sentences=3)
    tokenizer = pico_tokenizer()
    model = pico_base(vocab_size=len(tokenizer))
    prompts = make_prompts(section, 0, tokenizer=tokenizer)
    once, twice = (evaluate_model(model, tokenizer, section, 0, p) for p in (prompts, prompts_twice(prompts)))
    assert once.correct.keys() == twice.correct.keys() == {"kv_retrieval/4", "closed_book"}
    assert "perplexity" in once.summary and "perplexity" not in twice.summary
    for task, documents in prompts.choices.items():
        longer = prompts_twice(prompts).batches(task, tokenizer, 5, with_answers=False)[0].input_ids.shape[1]
        assert longer > prompts.batches(task, tokenizer, 5, with_answers=False)[0].input_ids.shape[1]
        assert len(documents) == len(twice.correct[task])
