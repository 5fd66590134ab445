"""Held-out rows of the user's data: wanted and generated texts side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surgery.data.generation import ExactAnswers
from surgery.probes.documents import Document
from surgery.report.text import cut_middle

_SHOWN = 12  # rows of a data set
_PROMPT = 2000  # characters of a prompt to keep


def examples_of(documents: Sequence[Document], answers: ExactAnswers) -> list[dict[str, str]]:
    """Select a dozen rows, spread evenly over all. They depend on the number of documents only.

    Returns:
        For each row: `prompt`, a long one cut in the middle; `wanted`, the answer without the end token; `generated`,
        the model's text.
    """
    count = min(_SHOWN, len(documents))
    chosen = [i * len(documents) // count for i in range(count)]
    return [
        {
            "prompt": cut_middle(documents[i].text[: documents[i].questions[-1].answer[0]], _PROMPT),
            "wanted": answers.wanted[i],
            "generated": answers.generated[i],
        }
        for i in chosen
    ]


def side_by_side(examples: Mapping[str, Mapping[str, Sequence[dict[str, str]]]]) -> dict[str, list[dict[str, Any]]]:
    """Join the examples of all arms: entry `held_out_examples` of results.json.

    Args:
        examples: arm -> data set -> examples of the same rows.

    Returns:
        Data set -> rows with `prompt`, `wanted` and `generated`, the text of each arm.
    """
    joined: dict[str, list[dict[str, Any]]] = {}
    for name in dict.fromkeys(name for of_arm in examples.values() for name in of_arm):
        by_arm = {arm: of_arm[name] for arm, of_arm in examples.items() if name in of_arm}
        joined[name] = [
            {**rows[0], "generated": {arm: row["generated"] for arm, row in zip(by_arm, rows, strict=True)}}
            for rows in zip(*by_arm.values(), strict=True)
        ]
    return joined
