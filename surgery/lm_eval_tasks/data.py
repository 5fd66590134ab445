"""Functions that the task files in this folder call: load the rows, and score a generated text.

lm-eval loads this file by its path, so it imports the standard library and `datasets` only.
"""

import json
from pathlib import Path
from typing import Any

import datasets


def rows(file: str, **model_arguments: Any) -> dict[str, datasets.Dataset]:
    """Load the prompts of one task. `ranked` is the prompt for choices: it includes earlier answers of a list.

    Args:
        file: name of a JSONL file in this folder.
        model_arguments: added by lm-eval; not used.
    """
    text = (Path(__file__).parent / file).read_text(encoding="utf-8")
    prompts = [json.loads(line) for line in text.splitlines()]
    for row in prompts:
        row["ranked"] = row["prompt"] + row.pop("given", "")
    return {"test": datasets.Dataset.from_list(prompts)}


def said(row: dict[str, Any], texts: list[str]) -> dict[str, float]:
    """Score one generated text.

    Returns:
        `exact_match`: the text begins with the answer and, if `bounded`, does not continue within the same number or
        word. `begun`: it begins with the answer, whatever follows. Of several answers, each must occur in the text.
    """
    (text,), answers = texts, row["answers"]
    if len(answers) > 1:
        every = float(all(answer in text for answer in answers))
        return {"exact_match": every, "begun": every}
    text, answer = text.lstrip(), answers[0]
    begun, last, after = text.startswith(answer), answer[-1], text[len(answer) : len(answer) + 1]
    continues = (last.isdigit() and after.isdigit()) or (last.isalpha() and after.isalpha())
    return {"exact_match": float(begun and not (row["bounded"] and continues)), "begun": float(begun)}
