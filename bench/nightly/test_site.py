"""The site of the documentation: it builds without a broken link, and has what pages of it need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import ROOT

pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'ssm-surgery[docs]'")


def test_the_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "true", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    linked = ("images/pipeline.svg", "files/recipes/finetune.yaml", "files/checkpoints/quickstart/export/plan.json")
    for name in ("index.html", "notebook.html", "EXTENDING.html", "paper/HEAD_CHOICE.html", *linked):
        assert (tmp_path / "site" / name).is_file(), name
    assert "<code>&nbsp;sailor</code>" in (tmp_path / "site" / "EVALUATE.html").read_text(), "the space belongs to it"
    assert "surgery.locate.locating.locate_heads" in (tmp_path / "site" / "api.html").read_text()
