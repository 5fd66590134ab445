"""Results of finished items, in a folder that several runs fill.

    results/PART.json    item -> rows, seconds, the GPU and the versions that ran it
    wheels/              built kernel packages, with a log of each build
    triton/, inductor/   compiled and tuned kernels
    gpu.json, table.txt  everything so far

A machine that is lent for minutes may return one folder only, and hand it out empty: `$OUT`. So the folder lies in the
working tree (`runs/gpu`), and every change is copied to `$OUT` if that is set.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from bench.gpu.env import Row
from bench.gpu.runner import plain

Entry = dict[str, Any]


class Store:
    """The folder of one table.

    Args:
        folder: holds everything that is kept. It is made if it does not exist.
        machine: describes GPU and versions; kept with each result.
    """

    def __init__(self, folder: Path, machine: str) -> None:
        self.folder, self.machine = folder, machine
        self.mirror = Path(os.environ["OUT"]) if os.environ.get("OUT") else None
        (folder / "results").mkdir(parents=True, exist_ok=True)

    def entries(self, part: str) -> dict[str, Entry]:
        """Item -> result, in the order in which they ended."""
        path = self._path(part)
        return json.loads(path.read_text()) if path.is_file() else {}

    def keep(self, part: str, item: str, rows: list[Row], seconds: float) -> None:
        """Add the result of an item, or replace it."""
        failed = any(row.get("failed") for row in rows)
        entry = {"rows": rows, "seconds": seconds, "failed": failed, "machine": self.machine}
        self.write(self._path(part), {**self.entries(part), item: entry})

    def forget(self, part: str, items: list[str], only_failed: bool) -> None:
        """Drop results, so that these items run again."""
        entries = self.entries(part)
        kept = {k: v for k, v in entries.items() if k not in items or (only_failed and not v["failed"])}
        if kept != entries:
            self.write(self._path(part), kept)

    def left(self, part: str, items: list[str]) -> list[str]:
        """The items without a result."""
        entries = self.entries(part)
        return [item for item in items if item not in entries]

    def write(self, path: Path, content: Any) -> None:
        """Write JSON or text in one step, and copy it."""
        text = content if isinstance(content, str) else json.dumps(plain(content), indent=1) + "\n"
        partial = path.with_suffix(".partial")
        partial.write_text(text)
        partial.replace(path)
        self.copy(path)

    def copy(self, path: Path) -> None:
        """Copy a file or a folder of the store to `$OUT`."""
        if self.mirror is None or self.mirror.resolve() == self.folder.resolve() or not path.exists():
            return
        to = self.mirror / path.relative_to(self.folder)
        to.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, to, dirs_exist_ok=True)
        else:
            shutil.copy2(path, to)

    def _path(self, part: str) -> Path:
        return self.folder / "results" / f"{part}.json"
