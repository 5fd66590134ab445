"""The shipped base, and runs of a recipe small enough for CI."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

import surgery.export.reload as surgery_reload
from tests.support.processes import Reloads, library, stock

ROOT = Path(__file__).parents[2]
BASE = ROOT / "checkpoints" / "pico-far"
PICO_MAMBA2 = ROOT / "checkpoints" / "pico-mamba2"
RECIPE = ROOT / "recipes" / "quickstart.yaml"

# The quickstart with little of everything: the same code, a few steps.
SMALL = (
    f"base.model={BASE}",
    "locate.examples=16",
    "locate.batch_size=16",
    "locate.pairs=16",
    "locate.filler=[0, 4]",
    "train.steps=6",
    "train.save_every=2",
    "train.sources.0.rows=2",
    "train.sources.0.pairs=[4, 6]",
    "train.sources.0.filler=[0, 1]",
    "train.sources.0.questions=4",
    "train.sources.1.rows=2",
    "train.sources.1.pairs=[4, 6]",
    "train.sources.1.questions=4",
    "train.sources.2.rows=4",
    "train.sources.3.rows=4",
    "train.sources.4.rows=4",
    "evaluate.tasks=[kv_retrieval, letter_choice, closed_book, closed_book_seen, perplexity, perplexity_seen]",
    "evaluate.pairs=[4, 8]",
    "evaluate.batch_size=64",
    "evaluate.examples=16",
    "evaluate.sentences=16",
    "evaluate.efficiency={lengths: [16], new_tokens: 1, repeats: 1}",
)


def surgery(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, forked from one that has imported the library."""
    return library().run(("surgery", *arguments), cwd)


def surgery_cold(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command line as a user starts it."""
    command = [sys.executable, "-m", "surgery", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def run_small(cwd: Path, *overrides: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """The small quickstart, in `cwd`/runs."""
    return surgery("run", str(RECIPE), *SMALL, *overrides, *options, cwd=cwd)


@pytest.fixture(scope="session", autouse=True)
def forked_reloads() -> Iterator[None]:
    """Reload exports in a forked child of a process without this library, not in a new process each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(surgery_reload, "subprocess", LazyReloads())
        yield


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reload exports as users do, in a new process."""
    monkeypatch.setattr(surgery_reload, "subprocess", subprocess)


class LazyReloads:
    """`Reloads` in the server that starts when it is first needed."""

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return Reloads(stock().address).run(command, **options)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The run folder of one finished small quickstart, the same for all workers; read it, do not change it."""
    own = tmp_path_factory.getbasetemp()
    cwd = (own if worker_id == "master" else own.parent) / "finished"
    with FileLock(f"{cwd}.lock"):
        if not cwd.is_dir():
            cwd.mkdir()
            done = run_small(cwd)
            assert done.returncode == 0, done.stderr
    return cwd / "runs" / "quickstart"


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium. Tests that request it are skipped where playwright or Chromium is not installed."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("Chromium is not installed")
    switches = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    switches += ["--disable-component-update", "--disable-sync"]
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=chromium, args=switches)
        yield running
        running.close()
