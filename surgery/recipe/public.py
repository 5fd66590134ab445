"""Model names in recipes, and the form of a recipe that can be published."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from surgery.errors import ModelError
from surgery.recipe.base import Base, Checkpoint, Teacher
from surgery.recipe.run import Recipe
from surgery.recipe.sources import Source


def source_of(model: str, revision: str | None) -> tuple[str, str | None]:
    """Split a folder or Hub id from its revision, which may follow it: `repo@revision`.

    Raises:
        ModelError: two revisions, or none after the @.
    """
    name, at, written = model.partition("@")
    if not at or Path(model).exists() or not is_hub_id(name):
        return model, revision
    if not written:
        raise ModelError("base.model", model, "The revision after the @ is empty. Use repo@revision.")
    if revision not in (None, written):
        raise ModelError("base.revision", revision, f"base.model has another one: {model}. Set it once.")
    return name, written


def is_hub_id(model: str) -> bool:
    return not Path(model).exists() and model.count("/") == 1 and not model.startswith((".", "~", "/"))


def public_name(model: str) -> str:
    """Return a Hub id without its revision, or the last part of a path (the run's name where that is `export`)."""
    model, _ = source_of(model, None)
    if model.count("/") == 1 and not Path(model).exists():
        return model
    path = Path(model).resolve()
    return path.parent.name if path.name == "export" else path.name


def public_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe in the form for publishing: folders and files of this machine become their last part.

    Revisions stay. One after a model's id moves to its `revision`; a tokenizer has no such key and keeps it.
    """
    base = _named(recipe.base)
    if base.tokenizer:
        tokenizer, revision = source_of(base.tokenizer, None)
        pinned = public_name(tokenizer) + (f"@{revision}" if revision else "")
        base = base.model_copy(update={"tokenizer": pinned})
    splice, control = recipe.splice, recipe.control
    if splice is not None and splice.teacher is not None:
        splice = splice.model_copy(update={"teacher": _named(splice.teacher)})
    train = recipe.train.model_copy(
        update={
            "sources": tuple(map(_public_source, recipe.train.sources)),
            "stages": tuple(
                stage.model_copy(update={"sources": tuple(map(_public_source, stage.sources))})
                for stage in recipe.train.stages
            ),
            "teacher": _named(recipe.train.teacher) if recipe.train.teacher else None,
        }
    )
    update = {"base": base, "splice": splice, "control": _named(control) if control else None, "train": train}
    return recipe.model_copy(update=update)


M = TypeVar("M", Base, Teacher, Checkpoint)


def _named(section: M) -> M:
    model, revision = source_of(section.model, section.revision)
    return section.model_copy(update={"model": public_name(model), "revision": revision})


def _public_source(source: Source) -> Source:
    if source.data is None:
        return source
    return source.model_copy(update={"data": source.data.model_copy(update={"path": public_name(source.data.path)})})
