"""Take finished stages from other runs of the same sweep, instead of computing them again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from surgery.files.atomic import copy_entry, delete, read_json
from surgery.locate.selection import can_choose_again, choose_again
from surgery.models.lookup import family_of
from surgery.recipe import Splice
from surgery.recipe.yaml import read_mapping
from surgery.run.context import Run
from surgery.run.folder import RunDir
from surgery.run.locate_stage import write_heads
from surgery.run.stage import Stage
from surgery.types import head_set_from_json


def origin_text(folder: Path, chosen_again: bool) -> str:
    """Describe where a stage is taken from."""
    return f"{'scores' if chosen_again else 'copied'} from {folder.name}"


def find_origin(run: Run, stage: Stage, key: str) -> tuple[Path, bool] | None:
    """Find a run in `run.siblings` with a finished stage that this run, where the stage has this key, can take.

    Returns:
        The folder of a run that finished the stage with the same key and unchanged outputs, and False; for locate also
        one of a run that measured the same and whose heads can be chosen again, and True. None if there is neither.
    """
    outputs = stage.outputs(run.recipe)
    if not stage.is_shared or not outputs:
        return None
    for folder in run.siblings:
        if RunDir(folder).is_fresh(stage.name, key, outputs):
            return folder, False
    if stage.name == "locate":
        for folder, measured in _measured(run):
            if RunDir(folder).is_fresh(stage.name, key_with_choice(run, stage, measured), outputs):
                return folder, True
    return None


def take_stage(run: Run, stage: Stage, key: str, folder: Path, chosen_again: bool) -> None:
    """Write the outputs of a stage from those of another run, and its manifest. Takes the time of the other run."""
    manifest = RunDir(folder).manifest(stage.name)
    assert manifest is not None
    run.rundir.forget(stage.name)
    if chosen_again:
        recipe, sites = run.recipe, family_of(run.config).sites(run.config)
        assert recipe.splice is not None
        heads, cost = (read_json(folder / name) for name in ("heads.json", "locate.json"))
        measured = replace(head_set_from_json(heads), cost=cost)
        write_heads(run, choose_again(measured, sites, recipe.splice, recipe.locate, recipe.seed))
    else:
        for name in stage.outputs(run.recipe):
            copy_entry(folder / name, run.folder / name)
        for name in stage.extras:
            if (folder / name).is_dir():
                copy_entry(folder / name, run.folder / name)
            else:
                delete(run.folder / name)
    run.rundir.finish(
        stage.name, key, stage.outputs(run.recipe), manifest["seconds"], origin_text(folder, chosen_again)
    )


def key_with_choice(run: Run, stage: Stage, choice: Splice) -> str:
    """Key of the stage locate if this run chose its heads as `choice` does."""
    assert run.recipe.splice is not None
    chosen = {"select": choice.select, "num_heads": choice.num_heads, "heads": choice.heads}
    splice = run.recipe.splice.model_copy(update=chosen)
    return stage.key(run, run.recipe.model_copy(update={"splice": splice}))


def _measured(run: Run) -> Iterator[tuple[Path, Splice]]:
    """Yield the runs whose heads may be chosen again, with the part of their splice that chooses heads."""
    splice = run.recipe.splice
    for folder in [folder for folder in run.siblings if (folder / "recipe.yaml").is_file()]:
        theirs = read_mapping(folder / "recipe.yaml").get("splice")
        if splice is None or not isinstance(theirs, dict):
            continue
        try:
            measured = Splice.model_validate(theirs)
        except ValidationError:  # of an earlier sweep, with a plugin or keys that this one lacks
            continue
        if can_choose_again(measured, splice, run.recipe.locate):
            yield folder, measured
