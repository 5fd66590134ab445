"""Writes support-ticket lookups as JSONL, to fine-tune a hybrid on. Owns: their text.

    python examples/tickets.py tickets.jsonl

Each line is {"prompt", "answer", "answer_span"}: a dozen open tickets or two, each a customer and an agent's number,
and the question who has one of them. `answer_span` says where the prompt holds the answer, so that a spliced head can
be shown what to read. The same seed writes the same lines. Must never know: the library, models, tokenizers.
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
    asked = rng.randrange(count)
    prompt, span = "Open tickets, customer and agent:\n", (0, 0)
    for place, (customer, agent) in enumerate(zip(customers, rng.sample(AGENTS, count), strict=True)):
        prompt += f"- {customer}:"
        if place == asked:
            span = (len(prompt), len(prompt) + len(str(agent)))
        prompt += f"{agent}\n"
    answer = prompt[slice(*span)]
    prompt += f"Which agent has the ticket of {list(customers)[asked]}?\n"
    return {"prompt": prompt, "answer": answer, "answer_span": list(span)}


def main() -> None:
    """Parses the command line and writes the file."""
    parser = argparse.ArgumentParser(description="Write support-ticket lookups as JSONL.")
    parser.add_argument("path", type=Path, help="the file to write")
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = Random(given.seed)
    with open(given.path, "w", encoding="utf-8") as file:
        for _ in range(given.lines):
            file.write(json.dumps(ticket_line(rng)) + "\n")
    print(f"wrote {given.lines} lines to {given.path}")


if __name__ == "__main__":
    main()
