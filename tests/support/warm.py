"""The command line in a process of its own, without the seconds that importing torch takes.

One process a test session imports the library and forks a child for every command: `python -m tests.support.warm`
reads a line of JSON for each and answers with the exit code. It never computes anything itself, so that the children
begin as a fresh process does; a command that needs another environment must be started the slow way.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_STARTED: list[subprocess.Popen[str]] = []


def run(arguments: tuple[str, ...], cwd: Path) -> subprocess.CompletedProcess[str]:
    """`python -m surgery ARGUMENTS` in `cwd`."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        asked = {"argv": ["surgery", *arguments], "cwd": str(cwd), "out": str(out), "err": str(err)}
        process = _process()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, "the warm process is gone"
        return subprocess.CompletedProcess(asked["argv"], json.loads(answer), out.read_text(), err.read_text())


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


def _become(asked: dict[str, Any], main: Any) -> None:
    """The command, in the child; does not return."""
    code = 1
    try:
        for path, descriptor in (("/dev/null", 0), (asked["out"], 1), (asked["err"], 2)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
        os.chdir(asked["cwd"])
        sys.path[0] = asked["cwd"]
        sys.argv = asked["argv"]
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
