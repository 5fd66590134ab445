"""Write support-ticket lookups as JSONL, to fine-tune a hybrid on.

    python examples/tickets.py tickets.jsonl

Each line is {"prompt", "answer", "answer_span"}. The prompt lists 12 to 24 open tickets (customer and agent's number)
and asks for the agent of one of them. `answer_span` is where the prompt contains the answer; it supervises the
attention of a new head. The same seed writes the same lines.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random
from typing import Any

SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou")
AGENTS = range(10, 100)


def ticket_line(rng: Random, low: int = 12, high: int = 24) -> dict[str, Any]:
    """One question over `low` to `high` tickets of different customers and agents."""
    count = rng.randint(low, high)
    customers: dict[str, None] = {}
    while len(customers) < count:
        customers["".join(rng.sample(SYLLABLES, 2)).capitalize()] = None
    chosen = rng.randrange(count)
    prompt, span = "Open tickets, customer and agent:\n", (0, 0)
    for place, (customer, agent) in enumerate(zip(customers, rng.sample(AGENTS, count), strict=True)):
        prompt += f"- {customer}:"
        if place == chosen:
            span = (len(prompt), len(prompt) + len(str(agent)))
        prompt += f"{agent}\n"
    answer = prompt[slice(*span)]
    prompt += f"Which agent has the ticket of {list(customers)[chosen]}?\n"
    return {"prompt": prompt, "answer": answer, "answer_span": list(span)}


def main() -> None:
    """Parse the command line and write the file."""
    parser = argparse.ArgumentParser(description="Write support-ticket lookups as JSONL.")
    parser.add_argument("path", type=Path, help="the file to write")
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.lines < 1:
        parser.error(f"--lines {options.lines}: use 1 or more")
    if not options.path.parent.is_dir():
        parser.error(f"{options.path}: there is no folder {options.path.parent}")
    rng = Random(options.seed)
    with open(options.path, "w", encoding="utf-8") as file:
        for _ in range(options.lines):
            file.write(json.dumps(ticket_line(rng)) + "\n")
    print(f"wrote {options.lines} lines to {options.path}")


if __name__ == "__main__":
    main()
