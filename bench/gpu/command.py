"""Test and time the toolkit on a GPU, in several commands of under 9 minutes each: `make gpu`, or `python bench/gpu`.

    python bench/gpu --build                    build the kernel packages from the archives in wheels/
    python bench/gpu --warm                     compile and tune every kernel
    python bench/gpu                            measure what has no result yet; repeat until nothing is left
    python bench/gpu --device cpu --toy         test the script itself, at sizes too small for timings

Results lie in `runs/gpu`, and are copied to `$OUT` if it is set. Exit code 1: a comparison exceeds its tolerance, or an
item failed. Exit code 2: this machine cannot run it. paper/BENCHMARKS.md explains how to run it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Part -> table of its lines, in the order in which they run. The module has the part's name.
PARTS = {
    "speed": "speed",
    "loop": "loop",
    "quickstart": "quickstart",
    "training": "training",
    "locate": "locate",
    "families": "correctness",
    "attention": "attention",
}
CACHES = {"triton": "TRITON_CACHE_DIR", "inductor": "TORCHINDUCTOR_CACHE_DIR"}
PACKAGES = "causal_conv1d,mamba_ssm,flash_attn"


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--toy", action="store_true", help="tiny sizes; with --device cpu it tests the script")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts: {', '.join(PARTS)}")
    parser.add_argument("--items", default="", help="only items whose name contains one of these words, with commas")
    parser.add_argument("--repeats", type=int, default=7, help="repeats of each timing")
    parser.add_argument("--seconds", type=float, default=480, help="time limit of this command")
    parser.add_argument("--build", nargs="?", const="causal_conv1d,mamba_ssm", help=f"build packages: {PACKAGES}")
    parser.add_argument("--warm", action="store_true", help="compile and tune kernels; measure nothing")
    parser.add_argument("--again", choices=("failed", "all"), help="drop these results of the selected items first")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "gpu", help="folder of the results")
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", help="wheels and source archives to use")
    for hidden in ("--child", "--log", "--work"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    asked.words = list(sys.argv[1:] if words is None else words)
    for option, known in (("only", set(PARTS)), ("build", set(PACKAGES.split(",")))):
        unknown = sorted({*(getattr(asked, option) or "").split(",")} - known - {""})
        if unknown:
            parser.error(f"--{option}: there is no {', '.join(unknown)}; choose of {', '.join(sorted(known))}")
    return asked


def main(words: Sequence[str] | None = None) -> int:
    """Runs the bench; returns the exit code."""
    asked = arguments(words)
    if asked.child:
        from bench.gpu.runner import child

        return child(part(asked.child), asked.work, Path(asked.log))
    from bench.gpu.env import Unready

    with tempfile.TemporaryDirectory(prefix="surgery-gpu-") as scratch:
        try:
            return bench(asked, Path(scratch))
        except Unready as error:
            print(str(error), file=sys.stderr)
            return 2


def part(name: str) -> Any:
    return importlib.import_module(f"bench.gpu.{name}")


def bench(asked: argparse.Namespace, scratch: Path) -> int:
    """Build, warm or measure, and return the exit code. `scratch` is temporary, for unpacked wheels and logs.

    Raises:
        Unready: this machine cannot run the bench, or no item has the given name.
    """
    from bench.gpu.env import Site, Unready, check_device, check_transformers, environment, machine
    from bench.gpu.store import Store

    began, site = time.monotonic(), Site(scratch / "site")
    site.use(asked.wheels)
    site.use(asked.folder / "wheels")
    check_transformers()
    check_device(asked.device)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site.folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    if asked.build:
        return _build(asked, scratch)
    found = environment(asked.device)
    store = Store(asked.folder, machine(found))
    store.keep("environment", "all", [*found, *({"line": line} for line in site.lines)], 0.0)
    wanted = selected(asked)
    if not any(wanted.values()):
        raise Unready(f"--items {asked.items}: no part of --only {asked.only} has such an item.")
    for name, names in wanted.items():
        for kind in ("compile-", "tune-") if asked.warm else ("",):
            if asked.again:
                store.forget(kind + name, names, asked.again == "failed")
    seconds = asked.seconds - (time.monotonic() - began)
    if asked.warm:
        _warm(asked, wanted, store, scratch, seconds)
    else:
        _measure(asked, wanted, store, scratch, seconds)
    return _report(asked, wanted, store)


def options_of(asked: argparse.Namespace) -> Any:
    from bench.gpu.runner import Options

    return Options(asked.device, asked.toy, 1 if asked.warm else asked.repeats)


def selected(asked: argparse.Namespace) -> dict[str, list[str]]:
    """Names of the items to run, by part."""
    words = [word for word in asked.items.split(",") if word]
    listing = "warm" if asked.warm else "items"
    named = {name: getattr(part(name), listing)(options_of(asked)) for name in PARTS if name in asked.only.split(",")}
    return {name: [i for i in all_ if not words or any(w in i for w in words)] for name, all_ in named.items()}


def _build(asked: argparse.Namespace, scratch: Path) -> int:
    """Build wheels for this GPU into the folder. Finished wheels are kept."""
    from bench.gpu.build import build
    from bench.gpu.store import Store
    from bench.gpu.table import aligned

    out = asked.folder / "wheels"
    rows = build(asked.build.split(","), asked.wheels, out, scratch, asked.seconds, asked.device)
    Store(asked.folder, "").copy(out)
    print("\n".join(aligned(("package", "result", "seconds"), rows)))
    return 0 if all(row["ok"] for row in rows) else 1


def _measure(asked: argparse.Namespace, wanted: dict[str, list[str]], store: Any, scratch: Path, limit: float) -> None:
    from bench.gpu.runner import here, supervised

    todo = [(name, left) for name, names in wanted.items() if (left := store.left(name, names))]
    if asked.device == "cuda":
        return supervised(todo, options_of(asked), limit, scratch, _keeper(store), variables=caches(store.folder))
    deadline = time.monotonic() + limit
    for name, names in todo:
        here(name, part(name), names, options_of(asked), deadline - time.monotonic(), _keeper(store))


def _warm(asked: argparse.Namespace, wanted: dict[str, list[str]], store: Any, scratch: Path, limit: float) -> None:
    """Compile all kernels side by side, then tune them alone: timings of candidates on a busy GPU mislead Triton."""
    from bench.gpu.runner import supervised

    deadline, cores = time.monotonic() + limit, min(len(os.sched_getaffinity(0)), 16)
    for kind, at_once, tunes in (("compile", cores, "0"), ("tune", 1, "1")):
        left = {name: store.left(f"{kind}-{name}", names) for name, names in wanted.items()}
        todo = [(name, items) for name, items in left.items() if items]
        if kind == "compile":
            todo = [(name, [item]) for name, items in todo for item in items]
        variables = {**caches(store.folder), "TRITON_CACHE_AUTOTUNING": tunes}
        seconds, keep = deadline - time.monotonic(), _keeper(store, kind)
        supervised(todo, options_of(asked), seconds, scratch, keep, at_once, variables)
    for name in CACHES:
        if (store.folder / name).is_dir():
            store.copy(Path(shutil.make_archive(str(store.folder / name), "tar", store.folder / name)))


def caches(folder: Path) -> dict[str, str]:
    """Variables that keep compiled and tuned kernels in the folder; unpacks those that were copied there."""
    for name in CACHES:
        if (folder / f"{name}.tar").is_file() and not (folder / name).exists():
            shutil.unpack_archive(folder / f"{name}.tar", folder / name)
    return {variable: str(folder / name) for name, variable in CACHES.items()}


def _keeper(store: Any, kind: str = "") -> Any:
    """Print that an item has ended, and keep its result. Of compiling and tuning, only failures are kept."""

    def keep(name: str, item: str, rows: list[dict[str, Any]], seconds: float) -> None:
        rows = [row for row in rows if not kind or (row.get("failed") and kind != "compile")]
        store.keep(f"{kind}-{name}" if kind else name, item, rows, seconds)
        print(f"{kind or 'measure'} {name} {item}: {seconds:.1f} s", file=sys.stderr, flush=True)

    return keep


def _report(asked: argparse.Namespace, wanted: dict[str, list[str]], store: Any) -> int:
    """Print and write the table, and what is left; returns the exit code."""
    from bench.gpu.table import failed, progress, sections, text

    kind = "tune-" if asked.warm else ""
    found = sections(store, {f"{kind}{name}": table for name, table in PARTS.items()})
    left = {name: store.left(f"{kind}{name}", names) for name, names in wanted.items()}
    if not asked.warm:
        store.write(store.folder / "gpu.json", {**found, "left": left, "ok": not failed(found)})
        store.write(store.folder / "table.txt", text(found) + "\n")
    print(text(found))
    print(progress(wanted, left, failed(found), _next(asked), store.folder), flush=True)
    return 1 if failed(found) else 0


def _next(asked: argparse.Namespace) -> str:
    """The command that does what is left: this one, without dropping results."""
    words = [w for w in asked.words if w not in ("--again", "failed", "all") and not w.startswith("--again=")]
    return f"make gpu GPU='{' '.join(words)}'" if words else "make gpu"
