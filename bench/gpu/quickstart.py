"""Run the quickstart as a user does: `surgery run quickstart`, with its export; then verify the export and use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.gpu.env import Row
from bench.gpu.runner import ROOT, Options, note

COMMITTED = ROOT / "checkpoints" / "quickstart"
FEW = [
    *("locate.examples=6", "locate.pairs=32", "locate.methods=[patching, sharpen]", "train.steps=1"),
    *("train.control=false", "evaluate.tasks=[perplexity]", "evaluate.sentences=4", "evaluate.generate=[]"),
    "evaluate.efficiency=null",
]


def items(options: Options) -> list[str]:
    """The three commands are one item, since each needs the one before."""
    return ["run, verify, generate"]


def warm(options: Options) -> list[str]:
    """None: the run tunes what it needs, as a user's first run does, and its time is part of the result."""
    return []


def run(item: str, options: Options) -> list[Row]:
    """A row of `quickstart` for each command and stage, and for the heads that were chosen."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "quickstart"
        commands = {
            "run": ["run", "quickstart", "--runs", folder, *(FEW if options.toy else [])],
            "verify": ["verify", str(out / "export")],
            "generate": ["generate", str(out / "export"), "In the spring the"],
        }
        rows: list[Row] = []
        for name in ("run", "verify") if options.toy else commands:
            start = time.perf_counter()
            said = _command(commands[name], options)
            if said is not None:
                return [*rows, note(f"surgery {name}", f"failed: {said}", failed=True)]
            rows.append({"what": f"surgery {name}", "found": f"{time.perf_counter() - start:.1f} s"})
        ours, theirs = (_heads(path / "heads.json") for path in (out, COMMITTED))
        found = f"{', '.join(ours)}; committed, from a CPU: {', '.join(theirs)}"
        rows.append({"what": "chosen head", "found": found, "ok": options.toy or ours == theirs})
        steps = [entry["seconds"] for entry in json.loads((out / "training.json").read_text())]
    total = f"{len(steps)} steps in {sum(steps):.1f} s, the second half in {sum(steps[len(steps) // 2 :]):.1f} s"
    return [*rows, {"what": "training of the hybrid", "found": total}]


def _heads(path: Path) -> list[str]:
    return [chosen["head"] for chosen in json.loads(path.read_text())["chosen"]]


def _command(words: list[str], options: Options) -> str | None:
    """Run a command of the toolkit. Returns its last lines if it failed."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {}
    command = [sys.executable, "-m", "surgery", "--debug", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **hidden})
    return None if done.returncode == 0 else " | ".join((done.stderr or done.stdout).strip().splitlines()[-6:])
