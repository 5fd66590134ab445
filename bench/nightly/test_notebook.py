"""examples/quickstart.ipynb runs from its first cell to its last, at a small size."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.conftest import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

PATH = ROOT / "examples" / "quickstart.ipynb"


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(PATH, as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    assert 'SIZE = "full"' in parameters.source
    parameters.source = f'SIZE = "small"\nOUTPUT = {str(tmp_path)!r}'
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(PATH.parent)}}).execute()

    printed = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", ()))
    assert "the same logits: True" in printed
    assert "largest difference of logits after reloading: 0.0" in printed
    images = [o for cell in notebook.cells for o in cell.get("outputs", ()) if "image/png" in o.get("data", {})]
    assert len(images) == 3
    assert (tmp_path / "hybrid" / "model.safetensors").is_file()
