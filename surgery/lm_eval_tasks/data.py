"""What the task files beside this one call: rows, and what counts as said. Must never import surgery.

lm-eval loads this file by its path, wherever the folder is. The standard library and `datasets`, which lm-eval has.
"""

import json
from pathlib import Path
from typing import Any

import datasets


def rows(file: str, **model_arguments: Any) -> dict[str, datasets.Dataset]:
    """The prompts of one task. lm-eval adds what it knows of the model, which they do not depend on.

    `ranked` is the prompt that choices are scored behind: in a list of answers, behind all of them but the last.
    """
    text = (Path(__file__).parent / file).read_text(encoding="utf-8")
    found = [json.loads(line) for line in text.splitlines()]
    for row in found:
        row["ranked"] = row["prompt"] + row.pop("given", "")
    return {"test": datasets.Dataset.from_list(found)}


def said(row: dict[str, Any], texts: list[str]) -> dict[str, float]:
    """`exact_match`: the text begins with the answer, and does not go on within the same number or word (if `bounded`).
    `begun`: it begins with it, whatever follows. Of several answers each has to stand in it.
    """
    (text,), answers = texts, row["answers"]
    if len(answers) > 1:
        every = float(all(answer in text for answer in answers))
        return {"exact_match": every, "begun": every}
    text, answer = text.lstrip(), answers[0]
    begun, last, after = text.startswith(answer), answer[-1], text[len(answer) : len(answer) + 1]
    goes_on = (last.isdigit() and after.isdigit()) or (last.isalpha() and after.isalpha())
    return {"exact_match": float(begun and not (row["bounded"] and goes_on)), "begun": float(begun)}
