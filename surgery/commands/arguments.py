"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from surgery.recipe import find_recipe


def _recipe(what: str) -> Any:
    return typer.Argument(metavar="RECIPE", help=what, callback=find_recipe)


RecipePath = Annotated[Path, _recipe("A recipe file, or a shipped recipe's name, such as quickstart.")]
PretrainPath = Annotated[Path, _recipe("A pretraining recipe: a file or a name, such as pretrain-pico.")]
AnalysisPath = Annotated[Path, _recipe("An analysis recipe: a file or a name, such as pico-reproduce.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Recipe values to set, such as seed=1.")
]
First = Annotated[
    str | None, typer.Option("--from", metavar="STAGE", help="Start at this stage, even if it is finished.")
]
Last = Annotated[str | None, typer.Option("--to", metavar="STAGE", help="Stop after this stage.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print plan, cost, time and memory without loading weights.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run of another recipe in this folder.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run the Python code in the checkpoint.")]
Runs = Annotated[Path, typer.Option("--runs", file_okay=False, help="Directory that holds the run folders.")]
Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", metavar="MODULE", help="Import a module that registers a format or a branch. Repeatable."),
]
