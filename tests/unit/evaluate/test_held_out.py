"""Held-out rows side by side, and the sentence about a run without a right answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from surgery.evaluate.held_out import advice_of, examples_of, side_by_side
from surgery.probes.documents import Document, Question
from surgery.recipe import Train
from surgery.scoring.generation import ExactAnswers


def answers(count: int) -> tuple[list[Document], ExactAnswers]:
    documents = []
    for i in range(count):
        prompt = f"prompt {i}: "
        documents.append(Document("rows", f"{prompt}{i}<end>", (Question((len(prompt), len(prompt) + 6), (), -1),)))
    wrong = torch.zeros(count, dtype=torch.bool)
    return documents, ExactAnswers(wrong, wrong, [str(i) for i in range(count)], [f"not {i}" for i in range(count)])


@pytest.mark.parametrize("count", [1, 5, 12, 13, 200])
def test_a_dozen_rows_spread_over_all(count: int) -> None:
    examples = examples_of(*answers(count))
    assert len(examples) == min(12, count)
    numbers = [int(example.wanted) for example in examples]
    assert numbers == sorted(set(numbers)) and numbers[0] == 0 and numbers[-1] >= count - count // 12 - 1
    for example in examples:
        assert (example.prompt, example.generated) == (f"prompt {example.wanted}: ", f"not {example.wanted}")


def test_a_long_prompt_is_cut_in_the_middle() -> None:
    prompt = "start" + "x" * 100_000 + "end?"
    document = Document("rows", prompt + "7", (Question((len(prompt), len(prompt) + 1), (), -1),))
    (example,) = examples_of([document], ExactAnswers(torch.ones(1), torch.ones(1), ["7"], ["7"]))
    assert len(example.prompt) == 2000 and example.prompt.startswith("start") and example.prompt.endswith("end?")


def test_the_texts_of_all_arms_are_joined_by_row() -> None:
    documents, first = answers(2)
    second = ExactAnswers(first.correct, first.first_token, first.wanted, ["a", "b"])
    arms = {
        "base": {"rows": examples_of(documents, first)},
        "hybrid": {"rows": examples_of(documents, second)},
        "x": {},
    }
    assert side_by_side(arms) == {
        "rows": [
            {"prompt": "prompt 0: ", "wanted": "0", "generated": {"base": "not 0", "hybrid": "a"}},
            {"prompt": "prompt 1: ", "wanted": "1", "generated": {"base": "not 1", "hybrid": "b"}},
        ]
    }
    assert side_by_side({"base": {}, "hybrid": {}}) == {}


def train_of(span: str | None, attention: float) -> Train:
    data = {"path": "rows.jsonl", "columns": {"answer_span": span}}
    source = {"data": data, "rows": 2, "weights": {"answer": 1.0, "attention": attention}}
    return Train.model_validate({"sources": [source], "steps": 123})


def arms_of(*accuracies: float, first_token: float = 0.0) -> dict[str, Any]:
    share = {"first_token": {"accuracy": first_token, "n": 95}}
    names = ("base", "no_splice", "hybrid")
    entries = {name: {"accuracy": value, "n": 95, **share} for name, value in zip(names, accuracies, strict=True)}
    return {name: {"held_out": {"rows.jsonl": entry, "texts": {"perplexity": 2.0}}} for name, entry in entries.items()}


@pytest.mark.parametrize("accuracies", [(0.1, 0.0, 0.0), (0.0, 0.1, 0.0), (0.0, 0.0, 0.1)])
def test_a_right_answer_of_any_arm_needs_no_advice(accuracies: tuple[float, ...]) -> None:
    assert advice_of(train_of("auto", 1.0), arms_of(*accuracies), {}) == []


COUNTS = {"found": 40, "ambiguous": 50, "missing": 5}


@pytest.mark.parametrize(
    ("span", "attention", "counts", "tip"),
    [
        (None, 0.0, {}, "set `data.columns.answer_span: auto`"),
        ("auto", 0.0, COUNTS, "set `data.columns.answer_span: auto`"),
        ("auto", 1.0, COUNTS, "found it in 40 of 95 rows"),
        ("auto", 1.0, {**COUNTS, "marked": 30}, None),
        ("auto", 1.0, {**COUNTS, "found": 200}, None),
        ("spans", 1.0, {}, None),
    ],
)
def test_zero_everywhere_says_so_and_what_to_try(
    span: str | None, attention: float, counts: dict[str, int], tip: str | None
) -> None:
    spans = {"rows.jsonl": counts} if counts else {}
    (text,) = advice_of(train_of(span, attention), arms_of(0.0, 0.0, 0.0), spans)
    assert text.startswith("rows.jsonl: no model generates any of the 95 held-out answers exactly. What to try: ")
    assert "train longer (now 123 steps)" in text and "check the format" in text
    assert ("answer_span" in text) == (tip is not None)
    assert tip is None or tip in text


def test_longer_training_after_a_plateau_needs_more_patience_not_more_steps() -> None:
    train, arms = train_of("auto", 1.0), arms_of(0.0, 0.0, 0.0)
    (at_plateau,) = advice_of(train, arms, {}, {"finetune": {"steps": 123, "plateau": 110}})
    assert (
        "(now 123 steps): a plateau ended a stage early, so increase `plateau.patience` or `plateau.min" in at_plateau
    )
    assert advice_of(train, arms, {}, {"finetune": {"steps": 123}}) == advice_of(train, arms, {}), "all steps"


def test_the_share_of_right_first_tokens_is_told() -> None:
    (text,) = advice_of(train_of("auto", 1.0), arms_of(0.0, 0.0, 0.0, first_token=0.957), {})
    assert "The hybrid's first token is right in 95.7% of them." in text


def test_a_run_without_own_data_has_no_advice() -> None:
    assert advice_of(train_of("auto", 1.0), {"base": {}, "hybrid": {}}, {}) == []
