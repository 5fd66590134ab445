"""The wheel, installed in a new environment, runs the quickstart where nothing else is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import yaml

from tests.integration.conftest import SMALL
from tests.integration.test_packaging import wheel

__all__ = ["wheel"]


def test_an_installed_wheel_runs_the_quickstart_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """A new environment with the dependencies of this one, but not the checkout."""
    environment, folder = tmp_path / "environment", tmp_path / "empty"
    folder.mkdir()
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    install = ("-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "-q", "--no-compile")
    command = [sys.executable, *install, "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-1000:]
    (site,) = environment.glob("lib/python*/site-packages")
    # Its .pth files are not read there, so an editable install of the checkout is not found.
    (site / "zz_dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def surgery(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(environment / "bin" / "surgery"), *words]
        return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)

    settings = [word for word in SMALL if not word.startswith(("base.", "train.steps", "evaluate."))]
    settings += ["train.steps=2", "train.optimizer.warmup=1", "evaluate.tasks=[kv_retrieval]", "evaluate.pairs=[4]"]
    done = surgery("run", "quickstart", *settings, "evaluate.examples=4", "evaluate.efficiency=null")
    assert done.returncode == 0, done.stderr[-2000:]
    written = folder / "runs" / "quickstart"
    recipe = yaml.safe_load((written / "recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["base"]["model"] == "checkpoints/pico-far"
    arms = json.loads((written / "results.json").read_text(encoding="utf-8"))["arms"]
    assert {"base", "no_splice", "hybrid"} <= set(arms)
    card = (written / "export" / "README.md").read_text(encoding="utf-8")
    assert "license: apache-2.0" in card and "model: pico-far" in card  # the license is that of the base's card
    leaks = [path for path in written.rglob("*") if path.is_file() and str(environment).encode() in path.read_bytes()]
    assert leaks == []
