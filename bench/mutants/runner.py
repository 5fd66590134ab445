"""Run the tests of a module on a mutant of it, in a forked child of a process that has imported torch already."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

KILLED, TIMED_OUT, SURVIVED = "killed", "timed out", "survived"
MEMORY = 6 << 30  # address space that a mutant may take on top of the parent's
FILE_SIZE = 1 << 30
WALL_LIMIT = 900.0  # seconds for all tests of one mutant, on a machine that may be busy
_IGNORED = shutil.ignore_patterns(".*", "runs", "build", "wheels", "__pycache__", "*.egg-info", "site")
_OURS = ("surgery", "tests")  # packages that are imported anew in each child, from the copy


class MeasureError(Exception):
    """The tests cannot judge mutants: they fail on the module as it is, or do not import it."""


@dataclass(frozen=True)
class Verdict:
    """Outcome of the tests on one mutant.

    Attributes:
        outcome: `killed`, `timed out` or `survived`.
        by: the first test that failed, or the signal that ended the process.
        seconds: processor time.
    """

    outcome: str
    by: str
    seconds: float


class _Replaced(importlib.abc.MetaPathFinder):
    """Finds one module and compiles the given source in place of the file's."""

    def __init__(self, module: str, path: Path, source: str) -> None:
        self.module, self.path, self.source = module, path, source
        self.imported = False

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name != self.module:
            return None
        self.imported = True
        locations = [str(self.path.parent)] if self.path.name == "__init__.py" else None
        loader = _Loader(name, str(self.path))
        loader.source = self.source
        return importlib.util.spec_from_file_location(
            name, self.path, loader=loader, submodule_search_locations=locations
        )


class _Loader(importlib.machinery.SourceFileLoader):
    source = ""

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source, self.path, "exec", dont_inherit=True)  # past the cached bytecode

    def get_source(self, fullname: str) -> str:
        return self.source


class _Watch:
    """A pytest plugin: notes the first failure, and gives each test a limit of processor time."""

    def __init__(self, limit: float) -> None:
        self.limit, self.failed = limit, ""
        self.restart()

    def restart(self) -> None:
        # Without a handler SIGPROF ends the process, also inside a loop in C.
        signal.setitimer(signal.ITIMER_PROF, self.limit)

    def pytest_collectstart(self) -> None:
        self.restart()

    def pytest_runtest_logstart(self) -> None:
        self.restart()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._note(report)

    def pytest_collectreport(self, report: Any) -> None:
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


class Runner:
    """Judges mutants of the modules of one tree.

    The tests run in a copy of the tree. So a mutant that deletes files harms nothing, and the tree may be edited while
    a measurement runs.

    Args:
        root: the checkout, with `surgery/` and `tests/`.
        limit: seconds of processor time for one test.
    """

    def __init__(self, root: Path, limit: float = 20.0) -> None:
        self.limit = limit
        self.scratch = Path(tempfile.mkdtemp(prefix="mutants-"))
        self.tree = self.scratch / "tree"
        shutil.copytree(root, self.tree, ignore=_IGNORED)
        if (self.tree / "tests" / "conftest.py").is_file():
            runpy.run_path(str(self.tree / "tests" / "conftest.py"))  # the environment that torch is imported in

    def close(self) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)

    def digest(self) -> str:
        """Hash of the code of the tree: results hold as long as it stays the same."""
        total = hashlib.sha256()
        for package in _OURS:
            for file in sorted((self.tree / package).rglob("*.py")):
                if "__pycache__" not in file.parts:
                    total.update(str(file.relative_to(self.tree)).encode() + b"\0" + file.read_bytes() + b"\0")
        return total.hexdigest()[:16]

    def path(self, module: str) -> Path:
        """Source file of a module in the copy."""
        base = self.tree.joinpath(*module.split("."))
        return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")

    def source(self, module: str) -> str:
        return self.path(module).read_text(encoding="utf-8")

    def check(self, modules: Iterable[str], tests: tuple[str, ...]) -> float:
        """Run the tests on the modules as they are, and import the libraries that they need into this process.

        Returns:
            Processor time in seconds.

        Raises:
            MeasureError: a test fails, or none imports one of the modules.
        """
        first, *_ = modules = list(modules)
        verdict, facts = self._fork(first, self.source(first), tests)
        if verdict.outcome != SURVIVED:
            raise MeasureError(f"{first}: the unchanged module fails {verdict.by}. Fix it, or take the test out.")
        for module in modules:
            if module not in facts["modules"] or (module == first and not facts["imported"]):
                raise MeasureError(f"{module}: none of {', '.join(tests)} imports it. Name tests that do.")
        for name in facts["modules"]:
            if name not in sys.modules and name.split(".")[0] not in _OURS:
                try:
                    importlib.import_module(name)
                except Exception:  # a part of a library that is not importable by itself
                    continue
        return verdict.seconds

    def judge(self, module: str, mutated: str, tests: tuple[str, ...]) -> Verdict:
        """Run the tests on a mutant until the first one fails."""
        return self._fork(module, mutated, tests)[0]

    def _fork(self, module: str, source: str, tests: tuple[str, ...]) -> tuple[Verdict, dict[str, Any]]:
        folder = self.scratch / "child"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        child = os.fork()
        if child == 0:
            self._become(folder, _Replaced(module, self.path(module), source), tests)
        status, usage = self._wait(child)
        facts_file = folder / "facts.json"
        facts = json.loads(facts_file.read_text()) if facts_file.is_file() else {"failed": "", "imported": True}
        code = os.waitstatus_to_exitcode(status)
        outcome = SURVIVED if code == 0 else TIMED_OUT if code in (-signal.SIGPROF, -signal.SIGKILL) else KILLED
        by = signal.Signals(-code).name if code < 0 else facts["failed"] or (f"exit code {code}" if code else "")
        return Verdict(outcome, by, round(usage.ru_utime + usage.ru_stime, 2)), facts

    def _wait(self, child: int) -> tuple[int, Any]:
        waited = 0.0  # while this process runs: it may be suspended together with the child
        while True:
            pid, status, usage = os.wait4(child, os.WNOHANG)
            if pid or waited > WALL_LIMIT:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)  # also processes that a test started and left
                if not pid:
                    _, status, usage = os.wait4(child, 0)
                return status, usage
            time.sleep(0.02)
            waited += 0.02

    def _become(self, folder: Path, replaced: _Replaced, tests: tuple[str, ...]) -> None:
        """The tests, in the child. Does not return."""
        code = 3
        gc.freeze()  # pytest collects garbage at its end, which would copy all memory shared with the parent
        try:
            os.setsid()
            with open(folder / "output", "w") as log, open(os.devnull) as nothing:
                for file, descriptor in ((nothing, 0), (log, 1), (log, 2)):
                    os.dup2(file.fileno(), descriptor)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY,) * 2)
            resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
            os.chdir(self.tree)
            os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(self.tree), "TMPDIR": str(folder)}
            tempfile.tempdir = None
            sys.path.insert(0, str(self.tree))
            for name in list(sys.modules):
                if name.split(".")[0] in _OURS:
                    del sys.modules[name]
            importlib.invalidate_caches()
            sys.meta_path.insert(0, replaced)
            watch = _Watch(self.limit)
            options = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={folder / 'tmp'}", f"--rootdir={self.tree}"]
            code = int(pytest.main([*options, *tests], plugins=[watch]))
            facts = {"failed": watch.failed, "imported": replaced.imported, "modules": list(sys.modules)}
            (folder / "facts.json").write_text(json.dumps(facts))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _address_space() -> int:
    """Bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
