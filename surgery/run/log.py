"""Append the events of a run to `run.log` in its folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from surgery import __version__
from surgery.errors import summary
from surgery.files.atomic import copy_entry, open_regular
from surgery.files.secret_scan import redacted
from surgery.report.progress_lines import ProgressLines
from surgery.run.context import Run

LOG = "run.log"


class _Log:
    """Pass every event on to another reporter, and append it to a file as a line with the time in UTC."""

    def __init__(self, path: Path, reporter: ProgressLines) -> None:
        self._path, self._reporter, self._lines = path, reporter, ProgressLines(self.append)

    def append(self, line: str) -> None:
        """Append one line. Tokens, as in an address that could not be read, are left out."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        handle = open_regular(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with open(handle, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{now}  {redacted(' '.join(line.splitlines()))}\n")

    def __getattr__(self, event: str) -> Callable[..., None]:
        def both(*given: Any) -> None:
            getattr(self._lines, event)(*given)
            getattr(self._reporter, event)(*given)

        return both


@contextmanager
def logged(run: Run) -> Iterator[None]:
    """Append the events inside the context to the run's log, with the error that ends it."""
    path = run.folder / LOG
    if path.is_file() and not path.is_symlink() and path.stat().st_nlink > 1:
        copy_entry(path, path)  # the folder was copied with hard links: the other copy keeps its log
    log = _Log(path, run.reporter)
    log.append(f"surgery {__version__}: {', '.join(run.stages)}")
    run.reporter = cast(ProgressLines, log)
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            log.append(f"stopped: {summary(error)}")
        raise
