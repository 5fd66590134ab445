"""The programs of docs/use.md, on the shipped example."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import surgery.hybrid  # noqa: F401  (registers the classes)
from tests.integration.conftest import ROOT

EXPORT = ROOT / "checkpoints" / "quickstart" / "export"
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "use.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def run(tmp_path: Path) -> str:
    """Run the program in a folder without this library's source, as its reader would."""
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "export").symlink_to(EXPORT)
    return str(tmp_path)


def output_of(program: str, folder: str) -> str:
    environment = {**os.environ, "HF_MODULES_CACHE": f"{folder}/modules", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_loading_and_generating(run: str) -> None:
    said = output_of(PROGRAMS[0], run)
    assert said.startswith("In the spring the") and len(said.split()) > 8


def test_training_with_peft_and_the_trainer(run: str) -> None:
    output_of(PROGRAMS[1], run)
    merged = AutoModelForCausalLM.from_pretrained(f"{run}/merged")
    before = AutoModelForCausalLM.from_pretrained(EXPORT).state_dict()
    after = merged.state_dict()
    changed = {name.rsplit(".", 2)[-2] for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys() and changed == {"in_proj", "qkv_proj"}
