"""Write case records in prose as JSONL, to fine-tune a hybrid on.

    python examples/records.py records.jsonl

Each line is {"prompt", "answer", "answer_span"}. The prompt has 3 to 6 records of one sentence each (`--records LOW
HIGH` changes it), and asks for the agent of one of them. In a record, 16 to 19 words stand between the name and the
agent's number, so a model cannot see both at once in a short convolution. `answer_span` is where the prompt
contains the answer; `--no-spans` leaves it out. The same options write the same lines. What a hybrid learns from
them: docs/your-data.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random
from typing import Any

SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou")
TOPICS = (
    "a parcel that came late", "a bill that was paid twice", "the lamp that broke", "a coat of the wrong size",
    "an order that never came", "a chair without one leg", "a letter for another house", "the phone that stays dark",
)  # fmt: skip
WISHES = (
    "and wants the money back", "and would like another one", "and hopes for a call", "and asked for news soon",
    "and sent a photo", "and will write again",
)  # fmt: skip


def record_line(rng: Random, low: int = 3, high: int = 6, digits: int = 2) -> dict[str, Any]:
    """One question over `low` to `high` records of different names and agents, with numbers of `digits` digits."""
    count = rng.randint(low, high)
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.sample(SYLLABLES, 2)).capitalize()] = None
    agents = rng.sample(range(10 ** (digits - 1), 10**digits), count)
    chosen = rng.randrange(count)
    prompt, span = "", (0, 0)
    for place, (name, agent) in enumerate(zip(names, agents, strict=True)):
        prompt += f"{name} wrote about {rng.choice(TOPICS)} {rng.choice(WISHES)}; this case is now with agent "
        if place == chosen:
            span = (len(prompt), len(prompt) + digits)
        prompt += f"{agent}.\n"
    answer = prompt[slice(*span)]
    prompt += f"Which agent has the case of {list(names)[chosen]}?\n"
    return {"prompt": prompt, "answer": answer, "answer_span": list(span)}


def main() -> None:
    """Parse the command line and write the file."""
    parser = argparse.ArgumentParser(description="Write case records in prose as JSONL.")
    parser.add_argument("path", type=Path, help="the file to write")
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", type=int, nargs=2, default=(3, 6), metavar=("LOW", "HIGH"), help="in a prompt")
    parser.add_argument("--digits", type=int, default=2, help="digits of an agent's number")
    parser.add_argument("--no-spans", action="store_true", help="leave `answer_span` out")
    options = parser.parse_args()
    if options.digits < 1:
        parser.error(f"--digits {options.digits}: use 1 or more")
    low, high = options.records
    most = min(len(SYLLABLES) * (len(SYLLABLES) - 1), 9 * 10 ** (options.digits - 1))  # different names, and numbers
    if not 1 <= low <= high <= most:
        parser.error(f"--records {low} {high}: use 1 to {most}, the smaller number first")
    if options.lines < 1:
        parser.error(f"--lines {options.lines}: use 1 or more")
    if not options.path.parent.is_dir():
        parser.error(f"{options.path}: there is no folder {options.path.parent}")
    rng = Random(options.seed)
    with open(options.path, "w", encoding="utf-8") as file:
        for _ in range(options.lines):
            line = record_line(rng, low, high, digits=options.digits)
            if options.no_spans:
                del line["answer_span"]
            file.write(json.dumps(line) + "\n")
    print(f"wrote {options.lines} lines to {options.path}")


if __name__ == "__main__":
    main()
