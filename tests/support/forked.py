"""Steps of a forked child that becomes a command: redirect its streams, run it, end with its exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


def redirect(out: Path | str, err: Path | str) -> None:
    """Read the standard input from nothing, and write the standard output and error to files."""
    for name, descriptor in (("/dev/null", 0), (out, 1), (err, 2)):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):  # pytest replaces them
        stream = open(descriptor, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def run_and_exit(command: Callable[[], object]) -> NoReturn:
    """Run a command and end the process with the exit code that Python would give it."""
    code = 1
    try:
        command()
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
