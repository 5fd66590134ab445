"""The programs of docs/use.md, on the shipped example."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import surgery.hybrid  # noqa: F401  (registers the classes)
from tests.integration.conftest import ROOT

EXPORT = ROOT / "checkpoints" / "quickstart" / "export"
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "use.md").read_text(encoding="utf-8"), re.DOTALL)


def test_the_programs_generate_and_train(tmp_path: Path) -> None:
    """One after the other in a folder without this library's source, as their reader would run them."""
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "export").symlink_to(EXPORT)
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", "\n".join(PROGRAMS)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("In the spring the") and len(done.stdout.split()) > 8
    assert re.search(r"^34\n50$", done.stdout, re.MULTILINE)  # answers from copies of one cache
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    before = AutoModelForCausalLM.from_pretrained(EXPORT).state_dict()
    changed = {name.rsplit(".", 2)[-2] for name in before if not torch.equal(before[name], merged[name])}
    assert before.keys() == merged.keys() and changed == {"in_proj", "qkv_proj"}
