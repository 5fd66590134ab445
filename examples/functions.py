"""Write look-ups of functions in code as JSONL, to fine-tune a hybrid on.

    python examples/functions.py functions.jsonl

Each line is {"prompt", "answer", "answer_span"}. The prompt is a Python file with 3 to 6 functions, and a call of
one of them. The answer is the number that this function returns. Between a function's name and its number stand its
parameter, a docstring and another call. `answer_span` is where the prompt contains the answer; `--no-spans` leaves
it out. The same options write the same lines. What a hybrid learns from them: docs/your-data.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random
from typing import Any

SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou")
PARAMETERS = ("path", "name", "text", "key", "row", "item", "user", "line")
TASKS = (
    "Read the file again.", "Send the letter.", "Count the words.", "Close the door.", "Find the next line.",
    "Keep the old name.", "Open the box.", "Write to the list.",
)  # fmt: skip
CALLS = ("check", "log", "load", "save", "sort", "clean")


def function_line(rng: Random, low: int = 3, high: int = 6, digits: int = 2) -> dict[str, Any]:
    """One call in a file of `low` to `high` functions of different names and numbers of `digits` digits."""
    count = rng.randint(low, high)
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.sample(SYLLABLES, 2))] = None
    numbers = rng.sample(range(10 ** (digits - 1), 10**digits), count)
    chosen = rng.randrange(count)
    prompt, span, call = "", (0, 0), ""
    for place, (name, number) in enumerate(zip(names, numbers, strict=True)):
        parameter = rng.choice(PARAMETERS)
        prompt += f'def {name}({parameter}):\n    """{rng.choice(TASKS)}"""\n'
        prompt += f"    {rng.choice(CALLS)}({parameter})\n    return "
        if place == chosen:
            span, call = (len(prompt), len(prompt) + digits), f">>> {name}('a')\n"
        prompt += f"{number}\n\n"
    return {"prompt": prompt + call, "answer": prompt[slice(*span)], "answer_span": list(span)}


def main() -> None:
    """Parse the command line and write the file."""
    parser = argparse.ArgumentParser(description="Write look-ups of functions in code as JSONL.")
    parser.add_argument("path", type=Path, help="the file to write")
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--digits", type=int, default=2, help="digits of a returned number")
    parser.add_argument("--no-spans", action="store_true", help="leave `answer_span` out")
    options = parser.parse_args()
    if options.digits < 1:
        parser.error(f"--digits {options.digits}: use 1 or more")
    if options.lines < 1:
        parser.error(f"--lines {options.lines}: use 1 or more")
    if not options.path.parent.is_dir():
        parser.error(f"{options.path}: there is no folder {options.path.parent}")
    rng = Random(options.seed)
    with open(options.path, "w", encoding="utf-8") as file:
        for _ in range(options.lines):
            line = function_line(rng, digits=options.digits)
            if options.no_spans:
                del line["answer_span"]
            file.write(json.dumps(line) + "\n")
    print(f"wrote {options.lines} lines to {options.path}")


if __name__ == "__main__":
    main()
