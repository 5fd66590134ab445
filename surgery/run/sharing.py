"""Take finished stages from other runs of the same sweep, instead of computing them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
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
from surgery.run.locate_stages import write_heads
from surgery.run.stage import Stage
from surgery.types import head_set_from_json


def origin_text(folder: Path, chosen_again: bool) -> str:
    return f"{'scores' if chosen_again else 'copied'} from {folder.name}"


def find_origin(run: Run, stage: Stage, key: str) -> tuple[Path, bool] | None:
    """Find a run in `run.siblings` with a finished stage that this run, where the stage has this key, can take.

    Returns:
        The folder of a run that finished the stage with the same key and unchanged outputs, and False; for locate also
        one of a run that measured the same and whose heads can be chosen again, and True. None if there is neither.
    """
    outputs = stage.outputs(run.recipe)

    def is_fresh(folder: Path, key: str) -> bool:
        return RunDir(folder).is_fresh(stage.name, key, outputs)

    return origin_among(run, stage, key, run.siblings, _choice_of, is_fresh)


def origin_among(
    run: Run,
    stage: Stage,
    key: str,
    folders: Sequence[Path],
    choice_of: Callable[[Path], Splice | None],
    is_fresh: Callable[[Path, str], bool],
) -> tuple[Path, bool] | None:
    """Find the origin of a stage as `find_origin` does.

    Args:
        folders: of the runs to search.
        choice_of: returns the splice of a run, which chooses its heads.
        is_fresh: whether a run has finished the stage with a key.
    """
    if not stage.is_shared or not stage.outputs(run.recipe):
        return None
    same = next((folder for folder in folders if is_fresh(folder, key)), None)
    if same is not None:
        return same, False
    splice = run.recipe.splice
    if stage.name != "locate" or splice is None:
        return None
    for folder in folders:
        measured = choice_of(folder)
        if measured is not None and can_choose_again(measured, splice):
            chosen = {name: getattr(measured, name) for name in ("select", "num_heads", "heads")}
            recipe = run.recipe.model_copy(update={"splice": splice.model_copy(update=chosen)})
            if is_fresh(folder, stage.key(run, recipe)):
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


def _choice_of(folder: Path) -> Splice | None:
    """Read the splice of a run. None if it has none, or one of an earlier sweep that cannot be read."""
    path = folder / "recipe.yaml"
    splice = read_mapping(path).get("splice") if path.is_file() else None
    with suppress(ValidationError):  # a plugin or keys that this sweep lacks
        return Splice.model_validate(splice) if isinstance(splice, dict) else None
    return None
