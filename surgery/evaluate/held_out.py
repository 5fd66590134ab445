"""Held-out rows of the user's data: wanted and generated texts side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surgery.probes.documents import Document
from surgery.report.text import cut_middle
from surgery.scoring.generation import ExactAnswers

_SHOWN = 12  # rows of a data set
_PROMPT = 2000  # characters of a prompt to keep


@dataclass(frozen=True)
class Example:
    """One held-out row as one model answers it.

    Attributes:
        prompt: long ones are cut in the middle.
        wanted: the answer of the row, without the end token.
        generated: the model's text.
    """

    prompt: str
    wanted: str
    generated: str


def examples_of(documents: Sequence[Document], answers: ExactAnswers) -> list[Example]:
    """Select a dozen rows, spread evenly over all. They depend on the number of documents only."""
    count = min(_SHOWN, len(documents))
    chosen = [i * len(documents) // count for i in range(count)]
    prompts = [documents[i].text[: documents[i].questions[-1].answer[0]] for i in chosen]
    return [
        Example(cut_middle(prompt, _PROMPT), answers.wanted[i], answers.generated[i])
        for i, prompt in zip(chosen, prompts, strict=True)
    ]


def side_by_side(examples: Mapping[str, Mapping[str, Sequence[Example]]]) -> dict[str, list[dict[str, Any]]]:
    """Join the examples of all arms: entry `held_out_examples` of results.json.

    Args:
        examples: arm -> data set -> examples of the same rows.

    Returns:
        Data set -> rows with `prompt`, `wanted` and `generated`, the text of each arm.
    """
    names = dict.fromkeys(name for of_arm in examples.values() for name in of_arm)
    joined: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        by_arm = {arm: of_arm[name] for arm, of_arm in examples.items() if name in of_arm}
        joined[name] = [
            {"prompt": row[0].prompt, "wanted": row[0].wanted,
             "generated": {arm: example.generated for arm, example in zip(by_arm, row, strict=True)}}
            for row in zip(*by_arm.values(), strict=True)
        ]  # fmt: skip
    return joined
