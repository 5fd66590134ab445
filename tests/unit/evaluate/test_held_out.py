"""Held-out rows side by side."""

from __future__ import annotations

import pytest
import torch

from surgery.evaluate.held_out import examples_of, side_by_side
from surgery.probes.documents import Document, Question
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
