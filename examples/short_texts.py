"""Write questions over short texts as JSONL, to fine-tune a hybrid on.

    python examples/short_texts.py texts.jsonl

Each line is {"prompt", "answer", "answer_span"}. The prompt has the lives of 2 to 4 people, a line each, and a
question about one of them: a town, a year, a trade or an animal. So the answer depends on the person and on what is
asked, and it is one word or number that occurs once in the prompt. `answer_span` is where; `--no-spans` leaves it
out. The same options write the same lines. What a hybrid learns from them: docs/your-data.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random
from typing import Any

SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou")
TRADES = ("baker", "pilot", "farmer", "judge", "nurse", "sailor", "tailor", "miner", "doctor", "painter", "singer")
ANIMALS = ("fox", "cat", "goat", "horse", "duck", "wolf", "bear", "sheep", "mouse", "crow", "snake", "tiger")
# What is told, in two wordings each, and what is asked about it. `{answer}` is the answer.
FACTS = {
    "born": (("{name} was born in {answer}.", "{answer} is the town where {name} was born."),
             "In which town was {name} born?"),
    "year": (("In {answer} {name} left for the first time.", "{name} left for the first time in {answer}."),
             "When did {name} leave?"),
    "trade": (("For many years {name} worked as a {answer}.", "{name} learned the trade of a {answer}."),
              "What was the work of {name}?"),
    "animal": (("At home {name} kept a {answer}.", "A {answer} lived in the house of {name}."),
               "Which animal did {name} have?"),
}  # fmt: skip


def _names(rng: Random, count: int, syllables: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.sample(SYLLABLES, syllables)).capitalize()] = None
    return list(names)


def text_line(rng: Random, low: int = 2, high: int = 4) -> dict[str, Any]:
    """One question over the lives of `low` to `high` people. No two of them share an answer."""
    count = rng.randint(low, high)
    people = _names(rng, count, 2)
    answers = {
        "born": _names(rng, count, 3),
        "year": [str(year) for year in rng.sample(range(1900, 2000), count)],
        "trade": rng.sample(TRADES, count),
        "animal": rng.sample(ANIMALS, count),
    }
    chosen, asked = rng.randrange(count), rng.choice(list(FACTS))
    prompt, span = "", (0, 0)
    for place, name in enumerate(people):
        for kind in rng.sample(list(FACTS), len(FACTS)):
            before, after = rng.choice(FACTS[kind][0]).split("{answer}")
            prompt += before.format(name=name)
            if (place, kind) == (chosen, asked):
                span = (len(prompt), len(prompt) + len(answers[kind][place]))
            prompt += answers[kind][place] + after.format(name=name) + " "
        prompt = prompt[:-1] + "\n"
    answer = prompt[slice(*span)]
    prompt += FACTS[asked][1].format(name=people[chosen]) + "\n"
    return {"prompt": prompt, "answer": answer, "answer_span": list(span)}


def main() -> None:
    """Parse the command line and write the file."""
    parser = argparse.ArgumentParser(description="Write questions over short texts as JSONL.")
    parser.add_argument("path", type=Path, help="the file to write")
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-spans", action="store_true", help="leave `answer_span` out")
    options = parser.parse_args()
    if options.lines < 1:
        parser.error(f"--lines {options.lines}: use 1 or more")
    if not options.path.parent.is_dir():
        parser.error(f"{options.path}: there is no folder {options.path.parent}")
    rng = Random(options.seed)
    with open(options.path, "w", encoding="utf-8") as file:
        for _ in range(options.lines):
            line = text_line(rng)
            if options.no_spans:
                del line["answer_span"]
            file.write(json.dumps(line) + "\n")
    print(f"wrote {options.lines} lines to {options.path}")


if __name__ == "__main__":
    main()
