"""Write the English text of the base `english`: the King James Version, 1611, in the public domain.

    apt install bible-kjv
    printf 'gen1:1-rev22:21\\nq\\n' | bible -f | python -m bench.studies.head_choice.english

Writes runs/english/text.jsonl, pieces of some 20 verses for `data`, and runs/english/text.txt for `tokenizer_text`.
"""

from __future__ import annotations

import json
import re
import sys

from bench.common import RUNS

VERSES = 20
FOLDER = RUNS / "english"
_VERSE = re.compile(r"(?:bible.*> )?[1-3]?[A-Z][a-z]+\d+:\d+ (.+)")

if __name__ == "__main__":
    verses = [match[1] for line in sys.stdin if (match := _VERSE.match(line.strip()))]
    pieces = [" ".join(verses[start : start + VERSES]) for start in range(0, len(verses), VERSES)]
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "text.txt").write_text("\n".join(verses) + "\n", encoding="utf-8")
    (FOLDER / "text.jsonl").write_text(
        "".join(json.dumps({"text": piece}) + "\n" for piece in pieces), encoding="utf-8"
    )
    print(f"{len(verses)} verses in {len(pieces)} pieces, {FOLDER}")
