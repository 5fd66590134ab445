"""Run commands in processes of their own without importing torch for each.

One process for each test session imports the library and forks a child for every command: it reads one line of JSON for
each and answers with the exit code. It computes nothing itself, so that the children start
in the state of a fresh process. A command that needs another environment must be started with `subprocess`.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tests.support.forked import redirect, run_and_exit

ROOT = Path(__file__).parents[2]
_STARTED: list[subprocess.Popen[str]] = []


def run(arguments: tuple[str, ...], cwd: Path) -> subprocess.CompletedProcess[str]:
    """`python -m surgery ARGUMENTS` in `cwd`."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        request = {"argv": ["surgery", *arguments], "cwd": str(cwd), "out": str(out), "err": str(err)}
        process = _process()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, "the warm process is gone"
        return subprocess.CompletedProcess(request["argv"], json.loads(answer), out.read_text(), err.read_text())


def processes() -> list[int]:
    """The ids of the warm processes that are running."""
    return [process.pid for process in _STARTED if process.poll() is None]


def _process() -> subprocess.Popen[str]:
    if not _STARTED or _STARTED[-1].poll() is not None:
        command = [sys.executable, "-m", "tests.support.warm"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        _STARTED.append(subprocess.Popen(command, cwd=ROOT, **pipes))
        atexit.register(_STARTED[-1].kill)
    return _STARTED[-1]


def serve() -> None:
    """Answers until its input ends."""
    from surgery import cli

    cli.quiet()
    import surgery.models.convert
    import surgery.reproduce.analysis
    import surgery.run.dry_run
    import surgery.run.pipeline
    import surgery.run.pretrain  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become(json.loads(line), cli.main)
        _, status = os.waitpid(child, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
        answers.flush()


def _become(request: dict[str, Any], main: Callable[[], object]) -> NoReturn:
    """Run the command, in the child."""

    def command() -> None:
        redirect(request["out"], request["err"])
        os.chdir(request["cwd"])
        sys.path[0] = request["cwd"]
        sys.argv = request["argv"]
        main()

    run_and_exit(command)


if __name__ == "__main__":
    serve()
