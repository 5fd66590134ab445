"""The shipped base, and one run that many tests read. Commands run in forked children: no test imports torch again."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from matplotlib.figure import Figure

import surgery.export.reload as surgery_reload
from tests.support import processes

ROOT = Path(__file__).parents[2]
BASE = ROOT / "checkpoints" / "pico-far"
PICO_MAMBA2 = ROOT / "checkpoints" / "pico-mamba2"
EXPORT = ROOT / "checkpoints" / "quickstart" / "export"
RECIPE = ROOT / "recipes" / "quickstart.yaml"

# The quickstart with little of everything: the same code, a few steps.
SMALL = (
    f"base.model={BASE}",
    "locate.examples=8",
    "locate.batch_size=8",
    "locate.pairs=20",
    "locate.filler=[0, 12]",
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
    "evaluate.examples=8",
    "evaluate.sentences=8",
    "evaluate.efficiency={lengths: [16], new_tokens: 1, repeats: 1}",
)
# A run of seconds, for what does not depend on the numbers: its results are of four prompts.
_QUICK = (
    "locate.methods=[patching, sharpen]",
    "train.steps=2",
    "evaluate.tasks=[kv_retrieval, perplexity]",
    "evaluate.pairs=[4]",
    "evaluate.examples=4",
    "evaluate.sentences=4",
    "evaluate.efficiency=null",
    "evaluate.generate=[]",
)
QUICK = (*(word for word in SMALL if word.split("=")[0] not in {w.split("=")[0] for w in _QUICK}), *_QUICK)


def surgery(*words: str, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`surgery WORDS` in the folder `cwd`, with the modules of the folder `path` importable."""
    return processes.run(("surgery", *words), cwd, None if path is None else with_path(path))


def ran(*words: str, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`surgery WORDS`, which has to succeed."""
    done = surgery(*words, cwd=cwd, path=path)
    assert done.returncode == 0, done.stderr
    return done


def with_path(*folders: Path, **more: str) -> Mapping[str, str]:
    """This environment, with folders and the checkout on PYTHONPATH."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*folders, ROOT))), **more}


def refused(*words: str, cwd: Path, path: Path | None = None) -> str:
    """The error line of a command that is refused: exit code 2, one line that begins with `error: `, no traceback."""
    done = surgery(*words, cwd=cwd, path=path)
    assert done.returncode == 2 and "Traceback" not in done.stderr, (words, done.returncode, done.stderr)
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    return line


def assert_all_refused(cases: Mapping[tuple[str, ...], tuple[str, ...]], cwd: Path) -> None:
    """Each command is refused with its words, and leaves the folder as it was."""
    before = sorted(cwd.rglob("*"))
    for command, expected in cases.items():
        line = refused(*command, cwd=cwd)
        assert [word for word in expected if word not in line] == [], (command, line)
        assert sorted(cwd.rglob("*")) == before, command


def run_small(cwd: Path, *overrides: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """The small quickstart, in `cwd`/runs."""
    return ran("run", str(RECIPE), *SMALL, *overrides, *options, cwd=cwd)


_SAVEFIG = Figure.savefig
PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEANl9ngAAAAABJRU5ErkJggg==")


def _draw_nothing(figure: Figure, path: Path, **options: Any) -> None:
    path.write_bytes(PIXEL if path.suffix == ".png" else b"<svg xmlns='http://www.w3.org/2000/svg'/>")


@pytest.fixture(scope="session", autouse=True)
def quick_commands() -> Iterator[pytest.MonkeyPatch]:
    """Commands reload exports in a child of a process without this library, and write figures of one pixel.

    Without the second, a third of a short run is drawing. The run of `finished` draws.
    """
    processes.import_library()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(surgery_reload, "subprocess", processes.Reloads())
        patch.setattr(Figure, "savefig", _draw_nothing)
        yield patch


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder that all workers share."""
    own = tmp_path_factory.getbasetemp()
    return own if worker_id == "master" else own.parent


@pytest.fixture(scope="session")
def finished(shared: Path, quick_commands: pytest.MonkeyPatch) -> Path:
    """The run folder of one finished small quickstart, the same for all workers; read it, do not change it."""
    cwd = shared / "finished"
    with FileLock(f"{cwd}.lock"):
        if not cwd.is_dir():
            cwd.mkdir()
            with quick_commands.context() as patch:
                patch.setattr(Figure, "savefig", _SAVEFIG)
                done = run_small(cwd)
            (cwd / "printed").write_text(done.stdout)
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
