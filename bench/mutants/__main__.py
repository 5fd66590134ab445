"""Measure how many mutants the unit tests kill.

Results go to runs/mutants/: results.jsonl with one line per mutant, survivors.diff, summary.json. An interrupted
measurement continues if no code has changed since.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.mutants.mutations import Mutant, diff, mutants, sample
from bench.mutants.runner import KILLED, SURVIVED, TIMED_OUT, MeasureError, Runner, Verdict
from bench.mutants.targets import TARGETS

ROOT = Path(__file__).parents[2]
Targets = dict[str, dict[str, tuple[str, ...]]]


class Record:
    """Verdicts on disk, one line of JSON each, so that an interrupted measurement can continue.

    Args:
        tree: hash of the code. Verdicts on other code, or by other test files, are not used again.
    """

    def __init__(self, file: Path, tree: str) -> None:
        self.file, self.tree = file, tree
        self.verdicts: dict[tuple[Any, ...], Verdict] = {}
        for line in file.read_text().splitlines() if file.is_file() else ():
            try:
                entry = json.loads(line)
            except ValueError:  # the last line of a process that was killed
                continue
            if entry["tree"] == tree:
                key = (entry["module"], entry["operator"], entry["occurrence"], tuple(entry["tests"]))
                self.verdicts[key] = Verdict(**entry["verdict"])

    def get(self, mutant: Mutant, tests: tuple[str, ...]) -> Verdict | None:
        return self.verdicts.get((mutant.module, mutant.operator, mutant.occurrence, tests))

    def add(self, mutant: Mutant, tests: tuple[str, ...], verdict: Verdict) -> None:
        self.verdicts[mutant.module, mutant.operator, mutant.occurrence, tests] = verdict
        entry = {"tree": self.tree, **asdict(mutant), "tests": tests, "verdict": asdict(verdict)}
        with open(self.file, "a") as file:
            file.write(json.dumps(entry) + "\n")


def measure(runner: Runner, targets: Targets, size: int, seed: int, folder: Path) -> dict[str, Any]:
    """Judge a sample of each target's mutants.

    Args:
        size: mutants of each target, over all its modules.
        folder: where results and survivors are written.

    Returns:
        By target: its modules, how many mutants are possible, sampled, killed, timed out and survived, and seconds of
        processor time.

    Raises:
        MeasureError: tests fail on an unchanged module.
    """
    folder.mkdir(parents=True, exist_ok=True)
    record = Record(folder / "results.jsonl", runner.digest())
    table: dict[str, Any] = {}
    survivors: list[str] = []
    for target, modules in targets.items():
        sources = {module: runner.source(module) for module in modules}
        possible = [mutant for module, source in sources.items() for mutant in mutants(module, source)]
        drawn = sample(possible, sources, size, seed)
        todo = {mutant.module for mutant, _ in drawn if record.get(mutant, modules[mutant.module]) is None}
        checks = [([m for m in modules if modules[m] == tests and m in todo], tests) for tests in set(modules.values())]
        checks = [(names, tests) for names, tests in checks if names]
        for names, tests in checks:
            seconds = runner.check(names, tests)
            print(f"{target}: {', '.join(names)}: {seconds:.1f} s without a mutant", flush=True)
        counts, seconds = Counter[str](), 0.0
        for mutant, mutated in drawn:
            tests = modules[mutant.module]
            verdict = record.get(mutant, tests)
            if verdict is None:
                verdict = runner.judge(mutant.module, mutated, tests)
                record.add(mutant, tests, verdict)
                place = f"{mutant.module}:{mutant.line} {mutant.operator}"
                print(f"{verdict.outcome:9} {verdict.seconds:5.1f} s  {place}", flush=True)
            counts[verdict.outcome] += 1
            seconds += verdict.seconds
            if verdict.outcome == SURVIVED:
                survivors.append(diff(mutant, sources[mutant.module], mutated))
        for names, tests in checks:
            runner.check(names, tests)  # no mutant has left anything that fails the tests
        table[target] = {
            "modules": list(modules),
            "possible": len(possible),
            "sampled": len(drawn),
            "killed": counts[KILLED],
            "timed_out": counts[TIMED_OUT],
            "survived": counts[SURVIVED],
            "seconds": round(seconds),
        }
        (folder / "survivors.diff").write_text("\n".join(survivors))
    return table


def summary(root: Path, table: dict[str, Any], size: int, seed: int) -> dict[str, Any]:
    """The table, and what is needed to measure it again."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
    packages = {name: version(name) for name in ("torch", "transformers", "pytest", "cosmic-ray")}
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit.stdout.strip(),
        "seed": seed,
        "sample": size,
        "versions": {"python": platform.python_version(), **packages},
        "targets": table,
    }


def show(table: dict[str, Any]) -> None:
    """Print the table with its sum."""
    names = ("possible", "sampled", "killed", "timed_out", "survived", "seconds")
    total = {name: sum(row[name] for row in table.values()) for name in names}
    print(f"{'':12}" + "".join(f"{name.replace('_', ' '):>11}" for name in names) + f"{'score':>9}")
    for target, row in {**table, "all": total}.items():
        score = (row["sampled"] - row["survived"]) / max(1, row["sampled"])
        print(f"{target:12}" + "".join(f"{row[name]:>11}" for name in names) + f"{score:>9.1%}")


def main(given: list[str] | None = None) -> int:
    """Exit code 0 when everything was measured, 2 when the tests cannot judge."""
    parser = argparse.ArgumentParser(
        prog="make mutants MUTANTS=", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"comma-separated targets of {', '.join(TARGETS)}")
    parser.add_argument("--sample", type=int, default=120, help="mutants per target (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=3, help="draws the sample (default: %(default)s)")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout to measure")
    parser.add_argument("--folder", type=Path, help="where results are written (default: runs/mutants)")
    options = parser.parse_args(given)
    targets: Targets = TARGETS
    if options.only:
        unknown = set(options.only.split(",")) - targets.keys()
        if unknown:
            parser.error(f"--only: {', '.join(sorted(unknown))}. Choose from {', '.join(targets)}.")
        targets = {name: targets[name] for name in options.only.split(",")}
    root = options.root.resolve()
    folder = (options.folder or root / "runs" / "mutants").resolve()
    runner = Runner(root)
    try:
        found = summary(
            root, measure(runner, targets, options.sample, options.seed, folder), options.sample, options.seed
        )
    except MeasureError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        runner.close()
    (folder / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    show(found["targets"])
    print(f"results: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
