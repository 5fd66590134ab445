"""The command `surgery init`, and the recipe of `surgery run --base`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from surgery.commands.arguments import TrustRemoteCode
from surgery.commands.progress import say
from surgery.commands.threads import set_up_cpu
from surgery.errors import RunError, SurgeryError, naming
from surgery.files.atomic import write_text
from surgery.recipe import find_recipe, load_recipe

DataFile = Annotated[
    str | None,
    typer.Option("--data", metavar="FILE", help="Your JSONL or Parquet with prompt and answer, messages, or text."),
]
Tokenizer = Annotated[
    str | None, typer.Option("--tokenizer", help="Folder or Hub id of the tokenizer. By default the model's.")
]
BaseOption = Annotated[
    str | None, typer.Option("--base", metavar="MODEL", help="Write the recipe of this model to RUNS, and run it.")
]


def init(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint folder or a Hub id.")],
    data: DataFile = None,
    tokenizer: Tokenizer = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Measure a model and print a recipe for it: surgery init MODEL > my.yaml."""
    print(_recipe_text("MODEL", model, data, tokenizer, trust_remote_code), end="")


def _recipe_text(argument: str, model: str, data: str | None, tokenizer: str | None, trust_remote_code: bool) -> str:
    """Measure the model of an argument and write a recipe for it. Progress goes to standard error."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        hint = "Run `surgery init MODEL > my.yaml` in one process, then launch `surgery run my.yaml`."
        raise RunError("num_processes", os.environ["WORLD_SIZE"], hint)
    set_up_cpu()
    from surgery.run.initial_recipe import write_recipe
    from surgery.run.measuring import measure_base

    with naming(argument, "base.model"), naming("--data", "data.path"), naming("--tokenizer", "base.tokenizer"):
        return write_recipe(measure_base(model, data, tokenizer, trust_remote_code, _say), _say)


def _say(line: str) -> None:
    say("init", line)


def recipe_of_base(
    model: str, data: str | None, tokenizer: str | None, trust_remote_code: bool, runs: Path, overwrite: bool
) -> Path:
    """Write the recipe of a base to RUNS/NAME.yaml, or find the one that an earlier call wrote there."""
    from surgery.run.initial_recipe import recipe_name

    path = runs / f"{recipe_name(model)}.yaml"
    if os.path.lexists(path) and not overwrite:
        stored = load_recipe(path)
        own = [entry.path for entry in stored.train.own_data]
        base = (stored.base.model, stored.base.tokenizer, stored.base.trust_remote_code)
        if base != (model, tokenizer, trust_remote_code) or own != ([] if data is None else [data]):
            hint = "It is the recipe of another base, tokenizer or data. Pass --overwrite, or another --runs folder."
            raise SurgeryError("--base", str(path), hint)
        _say(f"using {path}, written before. Pass --overwrite to measure again.")
        return path
    write_text(path, _recipe_text("--base", model, data, tokenizer, trust_remote_code))
    _say(f"wrote {path}")
    return path


def recipe_without_base(recipe: str | None, data: str | None, tokenizer: str | None, trust_remote_code: bool) -> Path:
    """Find the recipe of `surgery run` without --base. Refuses options that need it."""
    for option, key, value in (
        ("--data", "train.sources", data),
        ("--tokenizer", "base.tokenizer", tokenizer),
        ("--trust-remote-code", "base.trust_remote_code", trust_remote_code or None),
    ):
        if value is not None:
            raise SurgeryError(option, value, f"It needs --base. In a recipe, set {key}.")
    if recipe is None:
        hint = "Name a recipe, or set --base MODEL. `surgery recipes` lists the shipped ones."
        raise SurgeryError("RECIPE", None, hint)
    return find_recipe(recipe)
