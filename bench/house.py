"""Measure a checkout of this repository in numbers: layout, functions, classes, docstrings, README, frames.

    python bench/house.py [TREE] --json FILE              measure TREE (default: this checkout)
    python bench/house.py --compare BEFORE.json AFTER.json    print both as a Markdown table

Source files are parsed, not run (`house_source.py`). Only three measures run code of the tree, in separate processes:
the frames (`house_frames.py`), the imports of all modules, and the time of `import surgery`. The seconds of `make test`
and the mutants killed are read from JSON files (--tests, --mutants). paper/HOUSE.md,
defines the rows.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.house_frames import measure as frames
from bench.house_source import (
    classes,
    docstrings,
    functions,
    graph,
    layout,
    lines,
    sources_of,
    vague_assignments,
)

# Number of files to edit for each extension, counted by hand on commit 7b67d08. It is 1 if a test runs the extension as
# one file outside of the package.
EXTENSIONS = {
    "probe": "8",
    "objective": "6-10",
    "method": "6-8",
    "family": "3-9",
    "branch": "5-7",
    "format": "no place",
}
EXTENSION_TESTS = "tests/integration/test_extending.py"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure a tree or compare two measurements."""
    parser = argparse.ArgumentParser(description="Measure a checkout of this repository.")
    parser.add_argument("tree", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurement here")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"), help="print a Markdown table")
    parser.add_argument("--static", action="store_true", help="run no code of the tree")
    parser.add_argument("--tests", type=Path, metavar="FILE", help='{"seconds": number} of make test')
    parser.add_argument("--mutants", type=Path, metavar="FILE", help='{"killed": number, "mutants": number}')
    options = parser.parse_args(arguments)
    if options.compare:
        print(table({path.stem: json.loads(path.read_text()) for path in options.compare}))
        return
    measured = measure(options.tree.resolve(), options.static)
    for name, path in (("tests", options.tests), ("mutants", options.mutants)):
        if path is not None:
            measured[name] = json.loads(path.read_text())
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(measured, indent=1) + "\n")
    print(table({measured["commit"] or "tree": measured}))


def measure(tree: Path, static: bool = False) -> dict[str, Any]:
    """Measure a checkout.

    Args:
        static: skip the measures that run code of the tree.
    """
    sources = sources_of(tree / "surgery")
    commit = subprocess.run(["git", "-C", str(tree), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    measured = {
        "commit": commit.stdout.strip() or None,
        "layout": layout(sources),
        "imports": {"all": graph(sources), "module level": graph(sources, late=False)},
        "functions": functions(sources),
        "classes": classes(sources),
        "vague assignments": vague_assignments(sources),
        "docstrings": docstrings(sources),
        "lines": {part: lines(sorted((tree / part).rglob("*.py"))) for part in ("surgery", "bench", "tests")},
        "readme": readme((tree / "README.md").read_text(encoding="utf-8")),
        "extensions": extensions(tree),
    }
    if not static:
        measured |= {"import": import_cost(tree), "importable": importable(tree, sorted(sources))}
        measured["frames"] = frames(tree)
    return measured


def readme(source: str) -> dict[str, int]:
    """Count words outside of code fences and tables, and numbers outside of code fences.

    A word begins with a letter. A number is a token of digits without a letter or a hyphenated word before it:
    "Mamba-2" has none, "1,000" is one. Link targets, HTML and bare URLs do not count.
    """
    prose = re.sub(r"^(```|~~~).*?^\1", "", source, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"(?<=\])\([^)]*\)|<[^>]+>|https?://\S+", " ", prose)
    untabled = "\n".join(line for line in prose.splitlines() if not line.lstrip().startswith("|"))
    return {
        "words": len(re.findall(r"\b[^\W\d_][\w'’-]*", untabled)),
        "numbers": len(re.findall(r"(?<![\w.])(?<!\w-)\d+(?:[.,]\d+)*", prose)),
    }


def extensions(tree: Path) -> dict[str, str]:
    """Number of files to edit for each extension: 1 if a test has its name, or takes its name as a parameter."""
    path = tree / EXTENSION_TESTS
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8")))) if path.is_file() else []
    tests = [n for n in nodes if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    constants = [
        n for test in tests for mark in test.decorator_list for n in ast.walk(mark) if isinstance(n, ast.Constant)
    ]
    names = " ".join([*(test.name for test in tests), *(str(n.value) for n in constants)])
    words = set(re.findall("[a-z]+", names.lower()))
    return {kind: "1" if kind in words else count for kind, count in EXTENSIONS.items()}


def import_cost(tree: Path) -> dict[str, Any]:
    """Measure `import surgery`: the fastest of five in milliseconds, and True if it loads torch."""
    code = (
        "import sys, time; began = time.perf_counter(); import surgery;"
        "print((time.perf_counter() - began) * 1000, 'torch' in sys.modules)"
    )
    answers = [_python(tree, code).split() for _ in range(5)]
    return {"milliseconds": round(min(float(a[0]) for a in answers), 1), "torch": answers[0][1] == "True"}


def importable(tree: Path, modules: Sequence[str]) -> dict[str, Any]:
    """Check in one process that `import surgery.X.Y as m` yields a module, for every module but `__main__`."""
    names = [name for name in modules if not name.endswith("__main__")]
    code = f"""
import json
from types import ModuleType
failed = {{}}
for name in {names}:
    try:
        exec(f"import {{name}} as m")
        if not isinstance(m, ModuleType):
            failed[name] = "a " + type(m).__name__
    except Exception as error:
        failed[name] = type(error).__name__
print(json.dumps(failed))"""
    failures = json.loads(_python(tree, code).splitlines()[-1])
    return {"modules": len(names), "failed": len(failures), "failures": failures}


def _python(tree: Path, code: str) -> str:
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return done.stdout


# Row of the table -> its text for a measurement, as a format string over the measurement's keys.
ROWS = {
    "loose modules in the root of `surgery`": "{layout[root modules]}",
    "... of them, warnings at old paths": "{layout[old paths]}",
    "packages": "{layout[packages]}",
    "modules": "{layout[modules]}",
    "package cycles (module level alone)": "{imports[all][cycles]} ({imports[module level][cycles]})",
    "units in these cycles": "{imports[all][units in cycles]}",
    "pairs of units that import each other": "{imports[all][mutual]}",
    "import floors (every unit of a cycle counts)": "{imports[all][floors]} ({imports[all][floors of units]})",
    "arrows (module level alone)": "{imports[all][arrows]} ({imports[module level][arrows]})",
    "frames, locate, without `cli.py`": "{frames[locate][below_cli]}",
    "frames, locate, all: usual / deepest": "{frames[locate][usual]} / {frames[locate][deepest]}",
    "frames, train, without `cli.py`": "{frames[train][below_cli]}",
    "frames, train, all: usual / deepest": "{frames[train][usual]} / {frames[train][deepest]}",
    "functions": "{functions[number]}",
    "lines of a function: median / p90 / max": "{functions[median]:g} / {functions[p90]} / {functions[max]}",
    "longest function": "`{functions[longest]}`",
    "private helpers called once": "{functions[called once]} ({functions[called once, share]:.1%})",
    "classes with more than 10 fields": "{classes[more than 10 fields]}",
    "classes with more than 15 methods": "{classes[more than 15 methods]}",
    "assignments to `found`, `given`, `own`, ...": "{vague assignments[total]}",
    "public functions with a docstring": "{docstrings[functions with a docstring]} of {docstrings[functions]}",
    "public classes with a docstring": "{docstrings[classes with a docstring]} of {docstrings[classes]}",
    "`Args:`, where there are parameters": "{docstrings[with Args]} of {docstrings[with parameters]}",
    "`Returns:`, where there is a result too": "{docstrings[with Returns]} of {docstrings[with a result too]}",
    **{
        f"lines of {part}: code / comments and docstrings / blank": f"{{lines[{part}][code]:,}} / "
        f"{{lines[{part}][text]:,}} / {{lines[{part}][blank]:,}}"
        for part in ("surgery", "bench", "tests")
    },
    "modules that `import surgery.X.Y as m` fails for": "{importable[failed]} of {importable[modules]}",
    "`import surgery`, milliseconds (loads torch)": "{import[milliseconds]:g} ({import[torch]})",
    "README: words / numbers": "{readme[words]:,} / {readme[numbers]}",
    **{f"files to edit for a new {kind}": f"{{extensions[{kind}]}}" for kind in EXTENSIONS},
    "seconds of `make test`": "{tests[seconds]:g}",
    "mutants killed": "{mutants[killed]} of {mutants[mutants]}",
}


def table(measurements: Mapping[str, Mapping[str, Any]]) -> str:
    """Format measurements as a Markdown table, one column each. A missing measure is a dash."""
    lines = ["| measure | " + " | ".join(measurements) + " |", "|---" * (len(measurements) + 1) + "|"]
    for label, text in ROWS.items():
        lines.append(f"| {label} | " + " | ".join(cell(text, m) for m in measurements.values()) + " |")
    return "\n".join(lines)


def cell(text: str, measured: Mapping[str, Any]) -> str:
    """Format one cell; a dash if the measurement lacks it."""
    try:
        return text.format_map(measured)
    except KeyError:
        return "-"


if __name__ == "__main__":
    main()
