"""Run transformers' own common model tests on the plain class and the hybrid of every family.

    python -m bench.upstream --families mamba2,bamba --out paper/upstream

The tests come from the source distribution of the installed version, which pip downloads. It is unpacked, not built,
into `.upstream/`. Exit code 1 if a test passes for a plain class and not for its hybrid.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / ".upstream"
LISTS = ("lost", "fails for both", "fails where the plain class skips")
NAMES = {"granite": "granitemoehybrid"}  # names of families in transformers
# Modules that the tests import and the source distribution lacks: empty mixins, and a few fields of every config.
STAND_INS = {
    "__init__.py": "",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "utils/test_configuration_utils.py": "config_common_kwargs = {'return_dict': False, 'is_encoder_decoder': True}\n",
}

PAGE = """# transformers' own common tests

`make upstream` runs these tests on every family that can be spliced: on its plain class, and on a hybrid of the same
shape. The hybrid has one branch with `mode: add`, one with `mode: replace`, and in a third layer a Transformer's head
(in Llamba its whole attention). The tests come from the source distribution of the installed transformers, which pip
downloads. **Lost** counts tests that pass for the plain class and fail, or are skipped, for the hybrid.
`bench/upstream/` writes this page.

| test class | run | why not |
|---|---|---|
| `ModelTesterMixin`, `ConfigTester`, `TrainingTesterMixin` | yes | |
| `GenerationTesterMixin`, `ExportTesterMixin` | no | not in the source distribution: only `tests/test_*.py` are |
| `PipelineTesterMixin` | no | reads small models from the Hub |
| a family's own tests | no | not in the source distribution |
| `test_num_layers_is_small` | no | about the size of transformers' own testers |

Plain Mamba models return no attention weights, so they skip the tests of attention. Their hybrids run them. For Llamba
and mamba2attn the plain class is part of this library. `tests/unit/hybrid/test_common_properties.py` and
`tests/integration/test_conformance.py` test generation and pipelines.
"""


def fetch(version: str, folder: Path) -> Path:
    """Download the `tests` of transformers' source distribution with pip, and `parameterized`, which they import."""
    options = ["--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "parameterized"], check=True)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-binary", "transformers", "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, f"transformers=={version}"], check=True)
    with tarfile.open(folder / f"transformers-{version}.tar.gz") as archive:
        archive.extractall(folder, [member for member in archive if "/tests/" in member.name], filter="data")
    return folder / f"transformers-{version}" / "tests"


def put_together(tests: Path, package: Path) -> None:
    """Make a package of transformers' `tests`, with placeholders for the missing modules.

    Raises:
        FileNotFoundError: `tests` holds no `test_modeling_common.py`.
    """
    if not (tests / "test_modeling_common.py").exists():
        raise FileNotFoundError(f"{tests} holds no test_modeling_common.py")
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(tests, package)
    for name, text in STAND_INS.items():
        if not (package / name).exists():
            (package / name).parent.mkdir(exist_ok=True)
            (package / name).write_text(text, encoding="utf-8")


class Recorder:
    """pytest plugin that records the outcome of each test and why it failed. A failed subtest fails its test."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called by pytest for each phase of a test, and for each subtest."""
        test = report.nodeid.split("::", 1)[1]
        if report.failed:
            self.outcomes[test] = "failed"
            crash = getattr(report.longrepr, "reprcrash", None)
            self.reasons.setdefault(test, (crash.message if crash else str(report.longrepr)).splitlines()[0])
        elif self.outcomes.get(test) != "failed" and (report.when == "call" or report.skipped):
            self.outcomes[test] = report.outcome
            if report.skipped:
                self.reasons[test] = str(report.longrepr[2])


def by_kind(outcomes: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Group outcomes by plain and hybrid: `Test_mamba2_hybrid::test_x` becomes `{"hybrid": {"test_x": ...}}`."""
    kinds: dict[str, dict[str, str]] = {"plain": {}, "hybrid": {}}
    for name, outcome in outcomes.items():
        case, test = name.split("::")
        kinds[case.rsplit("_", 1)[1]][test] = outcome
    return kinds


def compared(outcomes: Mapping[str, str], reasons: Mapping[str, str]) -> dict[str, Any]:
    """Compare both kinds: counts, tests that pass for the plain class but not for the hybrid, and common failures."""
    kinds = by_kind(outcomes)
    plain, hybrid = kinds["plain"], kinds["hybrid"]
    case = next((name.split("::")[0] for name in outcomes if "_hybrid::" in name), "")
    lost = [test for test in plain if plain[test] == "passed" and hybrid.get(test) != "passed"]
    both = [test for test in plain if plain[test] == hybrid.get(test) == "failed"]
    alone = [test for test in hybrid if hybrid[test] == "failed" and plain.get(test) == "skipped"]
    return {
        "counts": {kind: dict(Counter(found.values())) for kind, found in kinds.items()},
        "lost": {test: f"{hybrid.get(test, 'absent')}: {reasons.get(f'{case}::{test}', '')}" for test in lost},
        "fails for both": {test: reasons.get(f"{case}::{test}", "") for test in both},
        "fails where the plain class skips": {test: reasons.get(f"{case}::{test}", "") for test in alone},
    }


def run_family(family: str, folder: Path, seconds: int) -> dict[str, Any]:
    """Run both test classes of a family in a separate process."""
    result = folder / "results" / f"{family}.json"
    result.parent.mkdir(exist_ok=True)
    result.unlink(missing_ok=True)
    paths = [str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "UPSTREAM_FAMILIES": family,
        "UPSTREAM_TIMEOUT": str(seconds),
    }
    log = result.with_suffix(".log")
    with log.open("w", encoding="utf-8") as output:
        command = [sys.executable, "-m", "bench.upstream", "--record", str(result)]
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output).returncode
    if not result.exists():
        raise RuntimeError(f"{family}: the tests ended with {code}; see {log}")
    return compared(**json.loads(result.read_text(encoding="utf-8")))


def record(result: Path) -> int:
    """Run the test classes in this process and write their outcomes."""
    recorder = Recorder()
    cases = str(Path(__file__).with_name("cases.py"))
    # Some tests wait for a warning that the settings of this repository would hide.
    code = pytest.main([cases, "--tb=short", "-p", "no:cacheprovider", "-W", "default"], plugins=[recorder])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return int(code)
    result.write_text(json.dumps({"outcomes": recorder.outcomes, "reasons": recorder.reasons}), encoding="utf-8")
    return 0


def table(families: Mapping[str, Mapping[str, Any]]) -> str:
    """Format one row for each family as Markdown, followed by the lists of lost and failed tests."""
    states = ("passed", "failed", "skipped")
    lines = [
        "| family | plain: passed | failed | skipped | hybrid: passed | failed | skipped | lost |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in families.items():
        counts = [found["counts"][kind].get(state, 0) for kind in ("plain", "hybrid") for state in states]
        cells = [NAMES.get(name, name), *map(str, counts), str(len(found["lost"]))]
        lines.append("| " + " | ".join(cells) + " |")
    for title in LISTS:
        rows = [(name, test, why) for name, found in families.items() for test, why in found[title].items()]
        if rows:
            lines += ["", f"{title.capitalize()}:", ""]
            lines += [f"- {NAMES.get(name, name)}, `{test}`: {why}" for name, test, why in rows]
    return "\n".join(lines) + "\n"


def page(folder: Path) -> str:
    """Format all results in a folder as one Markdown page, the newest release first."""
    results = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")]
    results.sort(key=lambda result: [int(part) for part in result["transformers"].split(".")], reverse=True)
    parts = [PAGE]
    for result in results:
        versions = f"torch {result['torch']}, Python {result['python']}, {result['date']}: `{result['command']}`"
        parts.append(f"## transformers {result['transformers']}\n\n{versions}\n\n{table(result['families'])}")
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Download and run the tests, print the table, and write it with --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", help="comma-separated names of tests/support/pico.py; all if not set")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for one test")
    parser.add_argument("--out", type=Path, help="a folder for a JSON file and a page of all of them")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.record:
        return record(options.record)

    import torch
    import transformers

    from tests.support.pico import SPLICED_FAMILIES

    folder = WORK / transformers.__version__
    package = folder / "upstream_tests"
    if not package.is_dir():
        put_together(fetch(transformers.__version__, folder), package)
    families = options.families.split(",") if options.families else SPLICED_FAMILIES
    found = {}
    for family in families:
        found[family] = run_family(family, folder, options.timeout)
        print(family, found[family]["counts"], f"lost {len(found[family]['lost'])}", flush=True)
    print("\n" + table(found))
    if options.out:
        header = {
            "command": " ".join(["python -m bench.upstream", *(arguments or sys.argv[1:])]),
            "date": date.today().isoformat(),
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        options.out.mkdir(parents=True, exist_ok=True)
        result = json.dumps({**header, "families": found}, indent=1) + "\n"
        (options.out / f"{transformers.__version__}.json").write_text(result, encoding="utf-8")
        (options.out / "README.md").write_text(page(options.out), encoding="utf-8")
    return int(any(result["lost"] for result in found.values()))


if __name__ == "__main__":
    sys.exit(main())
