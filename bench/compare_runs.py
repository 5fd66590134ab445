"""Compare a run with the committed example: `python bench/compare_runs.py RUN EXAMPLE`.

Prints the accuracies of both. Another machine or thread count rounds differently, so only accuracies whose 95%
intervals do not overlap are marked. Exit code 1 if the hybrid has such an accuracy at any number of pairs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(run: str, example: str) -> int:
    ours, theirs = (json.loads(Path(folder, "results.json").read_text()) for folder in (run, example))
    print(f"heads: {ours['heads']} here, {theirs['heads']} in {example}")
    failed = False
    for arm, summary in theirs["arms"].items():
        if arm not in ours["arms"]:
            continue
        for pairs, expected in summary["kv_retrieval"].items():
            found = ours["arms"][arm]["kv_retrieval"].get(pairs)
            if found is None:
                continue
            apart = found["low"] > expected["high"] or found["high"] < expected["low"]
            failed |= apart and arm == "hybrid"
            mark = "  <- apart" if apart else ""
            print(
                f"{arm:>9} {pairs:>3} pairs  {found['accuracy']:.3f} here  {expected['accuracy']:.3f} committed{mark}"
            )
    print(
        "the hybrid differs from the committed example"
        if failed
        else "equal to the committed example, within intervals"
    )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
