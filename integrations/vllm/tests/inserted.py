"""Exports with inserted layers: stock checkpoints that vLLM loads without the plugin. Used by `reference.py`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from surgery.export.folder import export_model
from surgery.models.loading import load_model, load_tokenizer
from surgery.models.lookup import family_of, geometry_of
from surgery.recipe import Base, Export
from surgery.splice.inserted import insert_layers
from surgery.testing.pico import randomise
from surgery.types import Graft, Plan

ROOT = Path(__file__).resolve().parents[3]
HEADS, BEFORE = (2, 5), 1
TRAINED = ROOT / "integrations" / "pair.yaml"


def inserted_case(base: Path, form: str, section: Export | None = None) -> Callable[[Path], None]:
    """Return a function that inserts a block or a pair before layer 1 of a base, and exports the hybrid.

    The output projection of the attention block is random: its 0 of the beginning would hide a difference. The Gather
    layer of a pair begins with copies, so its output is not 0.
    """

    def write(folder: Path) -> None:
        model, tokenizer = load_model(Base(model=str(base))), load_tokenizer(Base(model=str(base)))
        site = family_of(model.config).sites(model.config)[BEFORE]
        init = "ssm" if form == "pair" else "random"
        graft = Graft(site, HEADS, "add", init, ("segment_end",) * len(HEADS), form=form, before=BEFORE)
        plan = Plan(base=base.name, geometry=geometry_of(model.config), grafts=(graft,), seed=0)
        hybrid = insert_layers(model, plan)
        (entry,) = hybrid.config.inserted
        with torch.no_grad():
            randomise(hybrid.get_submodule(f"model.layers.{entry['layers'][-1]}.mixer.o_proj"), BEFORE)
        export_model(hybrid, tokenizer, folder, section or Export(format="nemotron_h"), plan=plan)

    return write


def trained_case(*overrides: str) -> Callable[[Path], None]:
    """Return a function that copies the export of a trained pair. The first call trains it: minutes of one core.

    Args:
        overrides: recipe values of the export, such as `export.format=gguf`.
    """

    def write(folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "surgery", "run", str(TRAINED), *overrides]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        shutil.copytree(ROOT / "runs" / "served-pair" / "export", folder)

    return write
