"""Which libraries the commands import. A command that computes nothing starts without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Runs several command lines in one process, then prints which of some modules are imported.
CODE = """
import contextlib, io, json, sys
from typer.testing import CliRunner
from surgery.cli import app
commands, watched = json.loads(sys.argv[1])
for words in commands:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, (words, result.output, result.exception)
print(json.dumps(sorted(set(watched) & sys.modules.keys())))
"""
LIGHT = [
    ["--version"],
    ["--help"],
    ["recipes"],
    ["recipes", "show", "quickstart"],
    ["schema"],
    ["schema", "--pretrain"],
    ["schema", "--analysis"],
    ["show", "checkpoints/quickstart"],
    ["validate", "pretrain-pico"],
    ["validate", "quickstart", "base.model=owner/not-in-the-cache"],
]
HELP = ["run", "finetune", "sweep", "locate", "train", "analyse", "pretrain", "validate", "show", "inspect", "generate"]
HELP += ["convert", "compare", "verify", "publish", "examples", "init", "recipes"]
DRAWING_AND_DATA = ["matplotlib", "peft", "datasets", "pandas", "pyarrow", "lm_eval", "scipy.stats", "bitsandbytes"]


def imported(commands: list[list[str]], watched: list[str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps([commands, watched])],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


def test_commands_that_compute_nothing_import_no_torch() -> None:
    commands = [*LIGHT, *([name, "--help"] for name in HELP)]
    assert imported(commands, ["torch", "transformers", "accelerate", *DRAWING_AND_DATA]) == []


@pytest.mark.parametrize("words", [["inspect", "checkpoints/pico-far"], ["validate", "quickstart"]])
def test_a_command_that_draws_nothing_imports_no_library_of_figures_data_or_adapters(words: list[str]) -> None:
    assert imported([words], DRAWING_AND_DATA) == []
