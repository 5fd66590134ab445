"""Test and time the toolkit on a GPU, in one command of under 9 minutes: `make gpu`, or `python bench/gpu`.

    python bench/gpu                            on a GPU: compare every family with the CPU, then time and train
    python bench/gpu --build                    the same, after building the kernel packages from wheels/
    python bench/gpu --device cpu --toy         test the script itself, at sizes too small for timings

Writes `$OUT/gpu.json`, or `runs/gpu/gpu.json` if OUT is not set, and prints a table. Exit code 1: a comparison exceeds
its tolerance, or an item failed. Exit code 2: this machine cannot run it. docs/BENCHMARKS.md explains how to run it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TABLES = ("environment", "build", "correctness", "behaviour", "attention", "speed", "training")
# Parts in order: module, table of its lines, share of the time that is left when the part begins.
PARTS = {
    "families": ("families", "correctness", 0.45),
    "attention": ("attention", "attention", 0.35),
    "speed": ("speed", "speed", 0.6),
    "training": ("training", "training", 1.0),
}


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    packages = "causal_conv1d,mamba_ssm,flash_attn"
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--toy", action="store_true", help="tiny sizes; with --device cpu it tests the script")
    parser.add_argument(
        "--only", default=",".join(PARTS), help=f"parts to run: {', '.join(PARTS)}; 'none' for --build only"
    )
    parser.add_argument(
        "--items", default="", help="run only items whose name contains one of these words, separated by commas"
    )
    parser.add_argument("--repeats", type=int, default=7, help="repeats of each timing")
    parser.add_argument("--seconds", type=float, default=510, help="time limit of the whole run")
    parser.add_argument(
        "--build", nargs="?", const=packages, default="", help=f"build these packages first: {packages}"
    )
    parser.add_argument("--build-seconds", type=float, default=240)
    parser.add_argument(
        "--wheels", type=Path, default=ROOT / "wheels", help="folder of wheels and source archives to use"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    for option, known in (("only", {*PARTS, "none"}), ("build", set(packages.split(",")))):
        unknown = sorted({*getattr(asked, option).split(",")} - known - {""})
        if unknown:
            parser.error(f"--{option}: there is no {', '.join(unknown)}; choose of {', '.join(sorted(known))}")
    return asked


def main(words: Sequence[str] | None = None) -> int:
    """Runs the bench; returns the exit code."""
    asked = arguments(words)
    if asked.child:
        from bench.gpu.runner import child

        return child(_part(asked.child), asked.work, asked.log)
    with tempfile.TemporaryDirectory(prefix="surgery-gpu-") as folder:
        return bench(asked, Path(folder))


def _part(name: str) -> Any:
    return importlib.import_module(f"bench.gpu.{PARTS[name][0]}")


def output_folder() -> Path:
    return Path(os.environ["OUT"]) if os.environ.get("OUT") else ROOT / "runs" / "gpu"


def bench(asked: argparse.Namespace, folder: Path) -> int:
    """Run the requested parts and return the exit code. `folder` is temporary, for unpacked wheels and logs."""
    from bench.gpu.env import Site, Unready, check_device, check_transformers, environment

    report, site = Report(asked), Site(folder / "site")
    site.use(asked.wheels)
    try:
        check_transformers()
        check_device(asked.device)
        report.add("build", _build(asked, folder, site))
        report.add("environment", environment(asked.device))
        report.lines("environment", site.lines)
    except Unready as error:
        report.lines("environment", site.lines)
        report.lines("environment", [str(error)], failed=True)
        report.write()
        print(str(error), file=sys.stderr)
        return 2
    wanted = items(asked)
    if asked.items and not any(wanted.values()):
        print(f"--items {asked.items}: no part of --only {asked.only} has such an item", file=sys.stderr)
        return 2
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site.folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    for name, names in wanted.items():
        report.add(PARTS[name][1], _measure(name, names, asked, report.left, folder))
        report.write()
    return report.end()


def _options(asked: argparse.Namespace) -> Any:
    from bench.gpu.runner import Options

    return Options(asked.device, asked.toy, asked.repeats)


def items(asked: argparse.Namespace) -> dict[str, list[str]]:
    """Names of the items to measure, by part."""
    words = [word for word in asked.items.split(",") if word]
    named = {name: _part(name).items(_options(asked)) for name in PARTS if name in asked.only.split(",")}
    return {name: [i for i in all_ if not words or any(w in i for w in words)] for name, all_ in named.items()}


def _build(asked: argparse.Namespace, scratch: Path, site: Any) -> list[dict[str, Any]]:
    """Build wheels for this GPU, use them in this run, and store them with the report."""
    from bench.gpu.build import build

    if not asked.build:
        return [{"line": "not asked for (--build)"}]
    built = output_folder() / "wheels"
    rows = build(asked.build.split(","), asked.wheels, built, scratch, asked.build_seconds, asked.device)
    site.use(built)
    return rows


def _measure(name: str, names: list[str], asked: argparse.Namespace, left: float, folder: Path) -> list[dict[str, Any]]:
    """Measure one part, within its share of the remaining time."""
    from bench.gpu.runner import here, supervised

    seconds = left * PARTS[name][2]
    if asked.device == "cpu":
        return here(name, _part(name), names, _options(asked), seconds)
    return supervised(name, names, _options(asked), seconds, folder)


class Report:
    """All results so far, by table."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.started, self.seconds = time.monotonic(), asked.seconds
        self.options = {
            key: value for key, value in vars(asked).items() if key not in ("child", "log", "work", "wheels")
        }
        self.sections: dict[str, dict[str, Any]] = {name: {"rows": [], "lines": []} for name in TABLES}

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.started)

    def add(self, table: str, rows: list[dict[str, Any]]) -> None:
        """Add rows to the tables that they name, and rows of words to the lines of this table."""
        for row in rows:
            kind = "lines" if "line" in row else "rows"
            self.sections[row.pop("table", table)][kind].append(row)

    def lines(self, table: str, words: list[str], failed: bool = False) -> None:
        self.sections[table]["lines"] += [{"line": line, "failed": failed} for line in words]

    @property
    def ok(self) -> bool:
        everything = [row for section in self.sections.values() for row in [*section["rows"], *section["lines"]]]
        return all(row.get("ok", True) and not row.get("failed") for row in everything)

    def write(self) -> Path:
        from bench.gpu.runner import plain

        path = output_folder() / "gpu.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        found = {**self.sections, "options": self.options, "ok": self.ok}
        seconds = time.monotonic() - self.started
        path.write_text(json.dumps(plain({**found, "seconds": seconds}), indent=1, sort_keys=True) + "\n")
        return path

    def end(self) -> int:
        """Prints the tables; returns the exit code."""
        from bench.gpu.table import text

        path = self.write()
        print(text(self.sections))
        verdict = "all as it should be" if self.ok else "NOT all as it should be: see NO and failed above"
        print(f"\n{time.monotonic() - self.started:.0f} s, {path}: {verdict}", flush=True)
        return 0 if self.ok else 1
