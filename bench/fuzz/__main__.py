"""`python -m bench.fuzz`: run the cases of a seed, print a table of outcomes, and the commands that repeat failures."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.fuzz import cases, runner
from bench.fuzz.cases import NAMES, Case
from bench.fuzz.corpus import Corpus
from bench.fuzz.runner import Verdict
from bench.fuzz.values import values_of
from tests.support.processes import Reloads, stock


class Session:
    """Everything that is loaded once: good inputs, odd values, the library, the process without it."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.seed = root, seed
        self.shared = root / "shared"
        self.shared.mkdir(parents=True, exist_ok=True)
        os.environ |= {
            "HF_HOME": str(self.shared / "hf"), "MPLCONFIGDIR": str(self.shared / "mpl"), "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self.values = values_of(seed)
        self.corpus = Corpus(root / "corpus")
        self.stock = stock()
        self.main = library()

    def run(self, number: int) -> tuple[Case, Verdict, Path]:
        """One case. A hang is tried a second time, since the machine may be busy."""
        case, verdict, place = self._once(number)
        if verdict.outcome == "hang":
            case, verdict, place = self._once(number)
        if verdict.outcome == "internal error":
            found = self._once(number, debug=True)[1]
            verdict = replace(verdict, group=found.group)
        return case, verdict, place

    def _once(self, number: int, debug: bool = False) -> tuple[Case, Verdict, Path]:
        place = self.root / "cases" / str(number)
        shutil.rmtree(place, ignore_errors=True)
        case = cases.build(self.seed, number, place, self.corpus, self.values)
        before = runner.snapshot(place / "work")
        if case.cold and not debug:
            ended = runner.start(case, place)
        else:
            ended = runner.fork(case, place, self.shared, self.main, Reloads(self.stock.address, seconds=20), debug)
        return case, runner.judge(case, place, before, ended), place

    def close(self) -> None:
        """Ends the other process."""
        self.stock.stop()


def library() -> Any:
    """Imports whatever a command may need, and gives `surgery.cli.main`. Nothing is computed: children are forked."""
    from surgery import cli
    from surgery.commands.progress import silence_libraries

    silence_libraries()
    import torch

    for name in ("mamba", "mamba2", "bamba", "falcon_mamba", "zamba2", "nemotron_h", "granitemoehybrid"):
        __import__(f"transformers.models.{name}.modeling_{name}")
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    return cli.main


def numbers(seed: int, count: int, only: tuple[str, ...]) -> Iterator[int]:
    """The numbers of the first `count` cases of these targets."""
    number = left = 0
    while left < count:
        if not only or cases.target_of(seed, number).__name__ in only:
            yield number
            left += 1
        number += 1


def summarise(seed: int, seconds: float, done: list[tuple[int, Case, Verdict]]) -> dict[str, Any]:
    """Cases by target and outcome, the slowest, and what was found, one entry a case."""
    table: dict[str, Counter[str]] = {}
    for _, case, verdict in done:
        table.setdefault(case.target, Counter())[verdict.outcome] += 1
    slowest = sorted(done, key=lambda entry: -entry[2].seconds)[:5]
    found = [{"number": n, **asdict(c), **asdict(v)} for n, c, v in done if not v.good]
    packages = {
        name: version(name) for name in ("torch", "transformers", "safetensors", "hypothesis", "tokenizers", "pydantic")
    }
    return {
        "seed": seed,
        "cases": len(done),
        "cold": sum(case.cold for _, case, _ in done),
        "seconds": round(seconds, 1),
        "processor_seconds": round(sum(os.times()[:4]), 1),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {"python": platform.python_version(), **packages},
        "table": {target: dict(counts) for target, counts in sorted(table.items())},
        "slowest": [
            {"number": n, "seconds": v.seconds, "command": c.arguments[0], "target": c.target} for n, c, v in slowest
        ],
        "findings": found,
    }


def print_summary(summary: dict[str, Any]) -> None:
    """The table, and findings by their cause."""
    outcomes = sorted({outcome for counts in summary["table"].values() for outcome in counts})
    outcomes.sort(key=lambda name: (name != runner.FINE, name != runner.REFUSED, name))
    print(f"{'':14}" + "".join(f"{name:>20}" for name in outcomes))
    for target, counts in summary["table"].items():
        print(f"{target:14}" + "".join(f"{counts.get(name, 0):>20}" for name in outcomes))
    slow = ", ".join(f"{s['number']} ({s['command']}, {s['seconds']:.1f} s)" for s in summary["slowest"])
    took = f"{summary['seconds']:.0f} s ({summary['processor_seconds']:.0f} s of a processor)"
    print(f"{summary['cases']} cases in {took}, {summary['cold']} of them cold; slowest: {slow}")
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for entry in summary["findings"]:
        groups.setdefault((entry["outcome"], entry["group"]), []).append(entry)
    for (outcome, group), entries in sorted(groups.items(), key=lambda item: -len(item[1])):
        of = ", ".join(str(entry["number"]) for entry in entries[:8])
        print(f"\n{outcome}, {len(entries)} times: {group}\n  {entries[0]['line'][:200]!r}\n  --case {of}")


def show(session: Session, number: int) -> bool:
    """Runs one case again and prints its input, its command and what came of it."""
    case, verdict, place = session.run(number)
    good = {path.name: path.read_bytes() for folder in session.corpus.folders("**/*") if (path := folder).is_file()}
    print(f"cd {place / 'work'} && python -m surgery {' '.join(map(repr, case.arguments))}\n")
    print("\n".join(case.notes), "\n")
    for path in sorted((place / "work").rglob("*")):
        if (
            path.is_file()
            and not path.is_symlink()
            and path.stat().st_nlink == 1
            and good.get(path.name) != path.read_bytes()
        ):
            print(f"--- {path.relative_to(place / 'work')}\n{path.read_bytes()[:1500]!r}")
    for name in ("out", "err", "log"):
        if (place / name).is_file():
            print(f"--- {name}\n{(place / name).read_text('utf-8', 'replace')[-6000:]}")
    print(f"--- {verdict.outcome}: {verdict.group} {verdict.line}")
    return verdict.good


def main(given: list[str] | None = None) -> int:
    """Exit code 0 where nothing was found."""
    parser = argparse.ArgumentParser(prog="make fuzz FUZZ=", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--only", type=lambda text: tuple(text.split(",")), default=(), help=", ".join(NAMES))
    parser.add_argument("--case", type=int, help="run this one, and print its input")
    parser.add_argument("--limit", type=float, default=runner.LIMIT, help="seconds after which a command hangs")
    parser.add_argument("--folder", type=Path, help="where inputs and findings are kept; a temporary folder if not set")
    options = parser.parse_args(given)
    unknown = set(options.only) - set(NAMES)
    if unknown:
        parser.error(f"--only {', '.join(sorted(unknown))}: choose from {', '.join(NAMES)}")
    root = (options.folder or Path(tempfile.mkdtemp(prefix="fuzz-"))).resolve()
    runner.LIMIT = options.limit
    session = Session(root, options.seed)
    try:
        if options.case is not None:
            return int(not show(session, options.case))
        done: list[tuple[int, Case, Verdict]] = []
        began = time.perf_counter()
        with suppress(KeyboardInterrupt):  # what is done is reported
            for number in numbers(options.seed, options.cases, options.only):
                case, verdict, place = session.run(number)
                done.append((number, case, verdict))
                if verdict.good:
                    shutil.rmtree(place, ignore_errors=True)
        summary = summarise(options.seed, time.perf_counter() - began, done)
    finally:
        session.close()
    print_summary(summary)
    (root / "fuzz.json").write_text(json.dumps(summary, indent=1) + "\n")
    if options.folder is None and not summary["findings"]:
        shutil.rmtree(root)
        return 0
    print(f"\nsummary: {root / 'fuzz.json'}; inputs of the findings: {root / 'cases'}")
    print(f"one again: make fuzz FUZZ='--seed {options.seed} --case NUMBER'")
    return int(bool(summary["findings"]))


if __name__ == "__main__":
    sys.exit(main())
